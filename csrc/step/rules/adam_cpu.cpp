#include "step/rules/adam.h"
#include "step/step_cpu.h"

namespace mpk::MPK_ISA {

template void step_span<Adam>(const StepRow&, const Span&, const StepScalars<Adam, double>&);

}  // namespace mpk::MPK_ISA
