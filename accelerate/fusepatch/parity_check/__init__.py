"""`fusepatch.parity()`: is what we patched as exact as the library it patches? Measured against fp32.

Not named `parity`: a sub-package of that name would hide the function once it is imported. Nothing is imported here, so
that the command line can list its arguments without importing torch.
"""
