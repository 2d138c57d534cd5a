"""Runs every case of ``python -m benchmarks`` under pytest-benchmark, with that tool's options, JSON and histories."""

from benchmarks import formatting
from benchmarks.measuring import run_one
from benchmarks.replayed_clock import replay


def test_beside_torch(benchmark, case, session, seconds):
    """Time ours as the benchmark, and put torch's time into extra_info."""
    result = run_one(case, session, seconds)
    samples = [microseconds / 1e6 for microseconds in result.ours_us]
    benchmark.group = f"{result.op} {result.place}"
    benchmark.extra_info.update(
        {
            "device": session.device,
            "dtype": result.dtype,
            "kernel": result.kernel,
            "baseline": result.baseline,
            "bytes moved": result.moved,
            "flops": result.flops,
            "GB/s": formatting.a_second(result, result.moved) / 1e9,
            "TFLOP/s": formatting.a_second(result, result.flops) / 1e12,
            "copy GB/s": session.copy_speeds[result.place] / 1e9,
            "of best": formatting.share(result, session),
            "x torch": result.ratio.median,
            "x torch interval": [result.ratio.low, result.ratio.high],
            "doubts": result.doubts,
            "counts": result.counts,
        }
    )
    benchmark.pedantic(replay.of(samples), rounds=len(samples))
