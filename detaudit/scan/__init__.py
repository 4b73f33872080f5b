"""The static scan: which kernels can make the order of threads visible, read from their machine code.

``sources`` finds files, ``containers`` the machine code images in them, ``tools`` disassembles one,
``sass`` and ``loops`` read instructions, ``functions`` puts a kernel together, ``scanner`` does it for many
images at once, by content cached (``cache``). ``suspects`` compares scans; ``join`` puts a scan beside the
kernels that modules launched. docs/scan.md says what this can and cannot know.
"""
