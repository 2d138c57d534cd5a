// Whether the CPU multiplies 16-bit matrices fast: tests set this, and the library asks nothing else.
#pragma once

inline __attribute__((visibility("default"), used)) int multiplies_halves_fast = 0;
