"""Triton's interpreter, mended. It cuts fp32 off to bf16, where every chip rounds to nearest even; it gives a 0 to
lanes that are masked off, where a chip gives them anything; in 3.7 its max of a number and NaN is NaN; it
believes what kernels say of alignment; it is slow."""

from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def to_fp32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values):
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def round_bf16_as_hardware_does():
    theirs = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        cast = {(tl.bfloat16, tl.float32): to_fp32, (tl.float32, tl.bfloat16): to_bf16}.get(
            (src.dtype.scalar, dst_type.scalar)
        )
        return interpreter.TensorHandle(cast(src.data), dst_type.scalar) if cast else theirs(self, src, dst_type)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def prefer_numbers_to_nan():
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, one, other: self.binary_op(one, other, np.fmax)
    builder.create_minnumf = lambda self, one, other: self.binary_op(one, other, np.fmin)


def poison_lanes_masked_off():
    theirs = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *hints, **named_hints):
        if other is None:
            dtype = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty()))
            ones = np.full(ptrs.data.shape, -1, f"i{dtype.itemsize}")  # in every bit: NaN in every format
            other = interpreter.TensorHandle(ones.view(dtype), ptrs.get_element_ty())
        return theirs(self, ptrs, mask, other, *hints, **named_hints)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load


def check_what_is_said_of_alignment():
    """Of an address that is read: a kernel may say it of one that it then leaves alone."""
    patch_theirs, load_theirs = interpreter._patch_lang_core, interpreter.InterpreterBuilder.create_masked_load
    elsewhere = np.uint64(1 << 62)

    def patch_lang_core(lang, scope):
        patch_theirs(lang, scope)
        believe = lang.multiple_of

        def multiple_of(input, values):
            said = believe(input, values)
            if input.dtype.is_ptr() and (input.handle.data % np.uint64(tl.constexpr(values).value)).any():
                handle = interpreter.TensorHandle(input.handle.data + elsewhere, input.dtype)
                return tl.tensor(handle, input.type)
            return said

        scope.set_attr(lang, "multiple_of", multiple_of)

    def create_masked_load(self, ptrs, *rest, **named):
        if (ptrs.data >= elsewhere).any():
            raise RuntimeError("tl.multiple_of was told of an address that is none")
        return load_theirs(self, ptrs, *rest, **named)

    interpreter._patch_lang_core = patch_lang_core
    interpreter.InterpreterBuilder.create_masked_load = create_masked_load


def patch_the_language_once_a_launch():
    """Each call of a device function patches triton.language anew, though its launch has: 70 % of a step's time."""
    theirs, patched, of_modules = interpreter._patch_lang, set(), {}

    def patch_lang(fn):
        module = fn.__globals__["__name__"]
        if module not in of_modules:
            values = [*fn.__globals__.values()]
            of_modules[module] = {it.__name__ for it in (tl, tl.core) if any(it is value for value in values)}
        languages = of_modules[module]
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = theirs(fn)
        if not patched:  # it is the launch's own, which ends with it
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(languages)
        return scope

    interpreter._patch_lang = patch_lang


def check_no_overflow_in_vain():
    """Each sum and product of integers is computed once more in int64, and what that shows is dropped outside of debug
    mode."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def look_up_numpys_dtypes():
    """It makes a table of all dtypes for each one that is asked for."""
    theirs, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = theirs(dtype)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def describe_each_type_once():
    """The interpreter works out a block's type, and what a tensor knows by its type, for each number: a third of its
    time. Types are alike if their elements and shapes are."""
    init_type, init_tensor, known_types, shapes = tl.block_type.__init__, tl.tensor.__init__, {}, {}

    def init_block_type(self, element_ty, shape):
        sizes = tuple([getattr(size, "value", size) for size in shape])
        pointer = getattr(element_ty, "address_space", None), getattr(element_ty, "const", None)
        key = element_ty.name, pointer, sizes
        if key in known_types:
            vars(self).update(known_types[key])
        else:
            init_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known_types[key] = vars(self)

    def init_known_tensor(self, handle, type):
        known = vars(type).get("_of_a_tensor")
        if known is None:
            init_tensor(self, handle, type)
            type._of_a_tensor = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(known)
            self.handle = handle

    tl.block_type.__init__, tl.tensor.__init__ = init_block_type, init_known_tensor
    _leave_equal_shapes_alone()


def _leave_equal_shapes_alone():
    theirs = TritonSemantic.broadcast_impl_value

    def broadcast(self, one, other):
        if one.type.is_block() and other.type.is_block() and one.type.shape is other.type.shape:
            return one, other
        return theirs(self, one, other)

    TritonSemantic.broadcast_impl_value = broadcast
