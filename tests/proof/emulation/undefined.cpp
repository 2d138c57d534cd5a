// What -fsanitize=... calls when a kernel's behaviour is undefined, in place of libubsan: the launch fails, with a
// sentence, and the process lives on. The signatures are the sanitizer's interface to the compiler.
#include "emulation/scheduler.h"

namespace {

struct Where {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[1];
};
struct Access {
  Where where;
  const Type* type;
  uint8_t log2_alignment, kind;
};

[[noreturn]] void fail_at(const Where& where, const std::string& what) {
  emulation::fail(what + emulation::text(emulation::Place(where.file, where.line)));
}

}  // namespace

extern "C" {

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const Access* access, uintptr_t address) {
  const std::string type = access->type->name;
  if (address == 0) fail_at(access->where, "uses a null pointer to " + type);
  const uintptr_t alignment = uintptr_t(1) << access->log2_alignment;
  if (address % alignment == 0) fail_at(access->where, "uses a pointer to " + type + " where there is no room for one");
  fail_at(access->where, "uses a pointer to " + type + " that is " + std::to_string(address % alignment) +
                             " bytes past a multiple of " + std::to_string(alignment));
}

// The other functions read only the place, which comes first in what the compiler hands over.
#define EMULATION_UNDEFINED(name, sentence) \
  [[noreturn]] void __ubsan_handle_##name##_abort(const Where* where) { fail_at(*where, sentence); }
EMULATION_UNDEFINED(out_of_bounds, "indexes outside an array")
EMULATION_UNDEFINED(add_overflow, "overflows a signed integer in an addition")
EMULATION_UNDEFINED(sub_overflow, "overflows a signed integer in a subtraction")
EMULATION_UNDEFINED(mul_overflow, "overflows a signed integer in a multiplication")
EMULATION_UNDEFINED(negate_overflow, "overflows a signed integer in a negation")
EMULATION_UNDEFINED(divrem_overflow, "divides an integer by zero, or overflows in a division")
EMULATION_UNDEFINED(shift_out_of_bounds, "shifts by more than the width, or shifts a negative number")
EMULATION_UNDEFINED(float_cast_overflow, "converts NaN or a number out of range to an integer")

}  // extern "C"
