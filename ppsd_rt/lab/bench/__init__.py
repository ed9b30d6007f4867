"""Measurements: single kernels, whole answers, and the report that both are printed as.

The rules of all of them: cases take turns (A B A B ...), every figure is a median with its range, ratios are taken
between neighbours in time, and a speed stands beside the memory bandwidth that was measured in the same run.
"""
