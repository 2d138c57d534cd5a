#include "step/rules/adamw.h"
#include "step/step_cpu.h"

namespace mpk::MPK_ISA {

template void step_span<Adamw>(const StepRow&, const Span&, const StepScalars<Adamw, double>&);

}  // namespace mpk::MPK_ISA
