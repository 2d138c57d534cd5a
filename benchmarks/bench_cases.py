"""Every case of ``python -m mpkernels bench``, for pytest-benchmark: its options, its JSON, its histories."""

from benchmarks.replay import replay
from mpkernels.bench import show
from mpkernels.bench.measuring import run_one


def test_beside_torch(benchmark, case, run, seconds):
    """Ours is the benchmark, torch's is beside it in extra_info."""
    result = run_one(case, run, seconds)
    samples = [microseconds / 1e6 for microseconds in result.ours_us]
    benchmark.group = f"{result.op} {result.place}"
    benchmark.extra_info.update(
        {
            "device": run.device,
            "dtype": result.dtype,
            "kernel": result.kernel,
            "baseline": result.baseline,
            "bytes moved": result.moved,
            "flops": result.flops,
            "GB/s": result.bytes_a_second / 1e9,
            "TFLOP/s": result.flops_a_second / 1e12,
            "copy GB/s": run.copy_speeds[result.place] / 1e9,
            "of best": show.share(result, run),
            "x torch": result.ratio.median,
            "x torch interval": [result.ratio.low, result.ratio.high],
            "doubts": result.doubts,
            "counts": result.counts,
        }
    )
    benchmark.pedantic(replay.of(samples), rounds=len(samples))
