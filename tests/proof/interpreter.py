"""Mends Triton's interpreter, which is slow, and differs from chips: it truncates fp32 to bf16, where every chip rounds
to nearest even; it gives a 0 to lanes that are masked off, where a chip gives them anything; in 3.7 its max of a number
and NaN is NaN; it believes what kernels say of alignment."""

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


def poison_masked_lanes():
    theirs = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, other, *hints, **named_hints):
        if other is None:
            dtype = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty()))
            ones = np.full(ptrs.data.shape, -1, f"i{dtype.itemsize}")  # all bits are set: NaN in every format
            other = interpreter.TensorHandle(ones.view(dtype), ptrs.get_element_ty())
        return theirs(self, ptrs, mask, other, *hints, **named_hints)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load


def check_alignment_hints():
    """Check tl.multiple_of when an address is read: kernels may say anything of addresses that they don't read."""
    patch_theirs, load_theirs = interpreter._patch_lang_core, interpreter.InterpreterBuilder.create_masked_load
    misaligned = np.uint64(1 << 62)  # added to an address whose hint is wrong

    def patch_lang_core(lang, scope):
        patch_theirs(lang, scope)
        theirs = lang.multiple_of

        def multiple_of(input, values):
            result = theirs(input, values)
            if input.dtype.is_ptr() and (input.handle.data % np.uint64(tl.constexpr(values).value)).any():
                handle = interpreter.TensorHandle(input.handle.data + misaligned, input.dtype)
                return tl.tensor(handle, input.type)
            return result

        scope.set_attr(lang, "multiple_of", multiple_of)

    def create_masked_load(self, ptrs, *rest, **named):
        if (ptrs.data >= misaligned).any():
            raise RuntimeError("tl.multiple_of: an address that is read is no such multiple")
        return load_theirs(self, ptrs, *rest, **named)

    interpreter._patch_lang_core = patch_lang_core
    interpreter.InterpreterBuilder.create_masked_load = create_masked_load


def patch_the_language_once_a_launch():
    """Each call of a device function patches triton.language, though its launch has: it took 70 % of a step's time."""
    theirs, patched, known_languages = interpreter._patch_lang, set(), {}

    def patch_lang(fn):
        module = fn.__globals__["__name__"]
        if module not in known_languages:
            values = [*fn.__globals__.values()]
            known_languages[module] = {it.__name__ for it in (tl, tl.core) if any(it is value for value in values)}
        languages = known_languages[module]
        if languages <= patched:
            return interpreter._LangPatchScope()
        scope = theirs(fn)
        if not patched:  # the launch's own scope, which ends with the launch
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(languages)
        return scope

    interpreter._patch_lang = patch_lang


def skip_unused_overflow_checks():
    """The interpreter computes each sum and product of integers again in int64, and outside of debug mode drops the
    result."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def remember_numpys_dtypes():
    """The interpreter makes a table of all dtypes each time one is looked up."""
    theirs, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = theirs(dtype)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def describe_each_type_once():
    """The interpreter works out a block's type, and a tensor's attributes that follow from it, for each number, in a
    third of its time. Types with the same elements and shapes have the same attributes."""
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


def convert_other_types_only():
    """Numbers of one type need no conversion, and a constant beside a block becomes the same block each time. To find
    that out took a third of a step's time."""
    theirs, blocks = TritonSemantic.binary_op_type_checking_impl, {}
    unchanged = "fp32", "fp64", "int32", "int64"  # by any operation with its own kind

    def convert(self, one, other, *options, **named):
        if named or not isinstance(one, tl.tensor):
            return theirs(self, one, other, *options, **named)
        if isinstance(other, tl.tensor):
            is_same = one.dtype.name in unchanged and one.type.name == other.type.name
            return (one, other) if is_same else theirs(self, one, other, *options)
        key = one.type.name, repr(other), options
        if key not in blocks:
            converted, block = theirs(self, one, other, *options)
            blocks[key] = block if converted is one else None
        return theirs(self, one, other, *options) if blocks[key] is None else (one, blocks[key])

    TritonSemantic.binary_op_type_checking_impl = convert
