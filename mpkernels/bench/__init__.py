"""Every op and every whole step beside torch's own, measured in turns. ``python -m mpkernels bench --help``.

cases.py lists what is compared, pairs.py times, results.py keeps; nothing else here measures.
"""
