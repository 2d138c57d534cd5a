from collections import namedtuple

from mpkernels.ops.step.op import StepOps
from mpkernels.ops.step.rule import Rule

Scalars = namedtuple("Scalars", "lr alpha weight eps")


def scalars(lr, alpha, eps, step):
    return Scalars(lr, alpha, 1 - alpha, eps)


def step(weight, grad, states, scalars):
    [square_avg] = states
    square_avg = square_avg * scalars.alpha + grad * scalars.weight * grad
    root = square_avg.double().sqrt().to(weight.dtype)
    return weight - scalars.lr * grad / (root + scalars.eps), [square_avg]


RMSPROP = Rule(
    name="rmsprop", states=("square_avg",), needed=1, not_negative=("square_avg",),
    hyperparameters=("lr", "alpha", "eps"), may_be_tensors=1, saves_steps=False, scalars=scalars, step=step,
)  # fmt: skip
rmsprop_ = StepOps(RMSPROP)
