"""Reads an expression as the calls that one fused op can replace, from the last call back to the first."""

import ast
from dataclasses import dataclass

from mpkernels.nn.fusing.inlined_names import Chain, Place, dotted, short


@dataclass(frozen=True)
class Dropout:
    """A function that is called between the activation and the last layer, with its p and training."""

    called: ast.expr
    p: ast.expr
    training: ast.expr


Layers = tuple[ast.expr, ...]


class Match:
    """One attempt to read an expression as a site. Each method takes the place of a call and returns the place of its
    argument. None means that this method or an earlier one has failed."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.down: ast.expr | None = None
        self.activation: ast.expr | None = None
        self.is_tanh_form = False
        self.is_squared = False
        self.between: list[ast.expr] = []
        self.dropout: Dropout | None = None
        self.chunk: ast.expr | None = None
        self.is_gate_last = False
        self.why_left = ""
        self.options: list[ast.expr] = []  # a dropout's p and training
        self.read: list[Place] = []  # further places that the fused call reads

    def before_last_layer(self, value: Place | None, passing: int) -> Place | None:
        """Match the last layer's call and, in its argument, so many calls of dropouts or identities."""
        self.down, value = self._module(value)
        for _ in range(passing):
            value = self._passed_on(value)
        return value

    def _module(self, value: Place | None) -> tuple[ast.expr | None, Place | None]:
        """Match ``self.layer(argument)``."""
        match self.chain.follow(value):
            case Place(ast.Call(layer, [argument], []), index) if self.chain.is_own(layer):
                return (None, None) if isinstance(argument, ast.Starred) else (layer, Place(argument, index))
        return None, None

    def _passed_on(self, value: Place | None) -> Place | None:
        """Match the call of a module, or of a function with p and training."""
        called, argument = self._module(value)
        if called is not None:
            self.between.append(called)
            return argument
        match self.chain.follow(value):
            case Place(ast.Call(function, [x, *positional], keywords), index) if self.chain.is_global(function):
                options = dict(zip(("p", "training"), positional, strict=False)) | {it.arg: it.value for it in keywords}
                if self.dropout or len(positional) > 2 or options.keys() != {"p", "training"}:
                    return None
                self.between.append(function)
                self.dropout = Dropout(function, options["p"], options["training"])
                self.options = [*options.values()]
                self.read += [Place(option, index) for option in self.options]
                return Place(x, index)
        return None

    def activated(self, value: Place | None) -> Place | None:
        value = self._unsquared(value) if self.down is not None else value
        self.activation, z = self._module(value)
        if z is not None:
            return z
        match self.chain.follow(value):
            case Place(ast.Call(called, [argument, *others], keywords), index) if self.chain.is_global(called):
                self.activation, options = called, [ast.unparse(it) for it in (*others, *keywords)]
                self.is_tanh_form = options == ["approximate='tanh'"]
                if not self.is_tanh_form and options not in ([], ["approximate='none'"]):
                    self.why_left = f"{short(called)} is called with {', '.join(options)}"
                return Place(argument, index)
        return None

    def _unsquared(self, value: Place | None) -> Place | None:
        """Return what is squared, or the value itself. Only an MLP's last layer hides that autocast squares in fp32."""
        match self.chain.follow(value):
            case (
                Place(ast.Call(ast.Attribute(base, "square"), [], []), index)
                | Place(ast.Call(ast.Attribute(base, "pow"), [ast.Constant(2)], []), index)
                | Place(ast.BinOp(base, ast.Pow(), ast.Constant(2)), index)
            ):
                self.is_squared = True
                return Place(base, index)
        return value

    def hidden(self, value: Place | None) -> tuple[Place, Layers] | None:
        layer, x = self._module(self.activated(value))
        return None if layer is None or x is None else (x, (layer,))

    def gated(self, value: Place | None, gate_at: int) -> tuple[Place, Layers] | None:
        value = self.chain.follow(value)
        if value is None or not isinstance(node := value.node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            return None
        sides = [Place(side, value.index) for side in (node.left, node.right)]
        gate, up = self.activated(sides[gate_at]), sides[1 - gate_at]
        return self._two_layers(gate, up) or self._one_layer(gate, up)

    def _two_layers(self, gate: Place | None, up: Place) -> tuple[Place, Layers] | None:
        """Match ``self.gate_layer(x)`` and ``self.up_layer(x)``."""
        (gate_layer, x), (up_layer, same_x) = self._module(gate), self._module(up)
        if gate_layer is None or up_layer is None or x is None or same_x is None:
            return None
        if dotted(gate_layer) == dotted(up_layer):
            return None
        is_same = isinstance(x.node, ast.Name) and isinstance(same_x.node, ast.Name) and x.node.id == same_x.node.id
        self.read.append(same_x)
        return (x, (gate_layer, up_layer)) if is_same else None

    def _one_layer(self, gate: Place | None, up: Place) -> tuple[Place, Layers] | None:
        """Match ``gate, up = self.layer(x).chunk(2, dim=-1)``, and the same with the gate last."""
        first, second = self.chain.half(gate), self.chain.half(up)
        if first is None or second is None or first.call is not second.call:
            return None
        if {first.which, second.which} != {0, 1}:
            return None
        layer, x = self._module(first.packed)
        self.chunk, self.is_gate_last = first.function, first.which == 1
        return None if layer is None or x is None else (x, (layer,))
