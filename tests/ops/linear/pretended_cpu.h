// Stands for what a CPU says of its instructions; tests set it.
#pragma once

inline __attribute__((visibility("default"), used)) int multiplies_halves_fast = 0;
