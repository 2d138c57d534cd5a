"""``python -m mpkernels bench``: steps, layers and small trainings beside torch's, timed in turns.

cases.py lists what is compared and pairs.py times it. A checkout's ``python -m benchmarks`` has more cases.
"""
