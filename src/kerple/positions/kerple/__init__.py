"""KERPLE: kernels of distance as attention biases and weights, with the paper's eight under their names.

Chi et al. 2022, arXiv 2205.09921: power and log are section 4, the others the variants of tables 5 and 6.
"""
