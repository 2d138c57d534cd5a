#include "step/rules/lion.h"
#include "step/step_cpu.h"

namespace mpk::MPK_ISA {

template void step_span<Lion>(const StepRow&, const Span&, const StepScalars<Lion, double>&);

}  // namespace mpk::MPK_ISA
