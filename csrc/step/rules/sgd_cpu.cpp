#include "step/rules/sgd.h"
#include "step/step_cpu.h"

namespace mpk::MPK_ISA {

template void step_span<Sgd>(const StepRow&, const Span&, const StepScalars<Sgd, double>&);

}  // namespace mpk::MPK_ISA
