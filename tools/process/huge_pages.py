"""Memory of a process that compiles: MindSpore's front end allocates small objects without end.

With glibc's malloc on transparent huge pages it takes a tenth (mini recipes) to a fifth (large ones) less time
(benchmarks/RESULTS.md). An older glibc, another libc or a kernel without such pages ignores the setting.
"""

ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # a default: what the user has set stays
