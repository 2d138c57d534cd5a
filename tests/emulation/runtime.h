#pragma once

extern "C" int emulation_launches;  // of kernels, products by cuBLAS among them

namespace emulation {

// Counts a call that gives a stream work, or that a library may refuse; true where a test wants it to fail.
bool fails_on_demand();

}  // namespace emulation
