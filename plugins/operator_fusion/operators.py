"""The operators that MindSpore's graph kernels may fuse for DVM, by the level of `fusion_ops_level` that takes them in.

From MindSpore's public sources: `clusterable_ops_with_level_dvm` of graph_kernel_cluster_cloud.cc and
`expand_ops_with_level_dvm` of graph_kernel_expander_cloud.cc. The compiled lists of a wheel cannot be asked. Of the
vector operators, 25 were seen in clusters of 2.9.0's passes (docs/fusion.md).
"""

from __future__ import annotations

VECTOR = (
    "Abs", "Add", "Assign", "BroadcastTo", "Cast", "Ceil", "Div", "Equal", "Exp", "Floor", "Greater", "GreaterEqual",
    "IsFinite", "Less", "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul", "Neg",
    "NotEqual", "Pow", "RealDiv", "Reciprocal", "ReduceSum", "Rsqrt", "Select", "Sqrt", "Sub", "Transpose", "Trunc",
)  # fmt: skip
CUBE = ("BatchMatMul", "GroupedMatmul", "MatMul", "Reshape")
# composite operators, which are opened into the ones above before anything is fused
EXPANDED = (
    "AcoshExt", "Adam", "AdamApplyOneWithDecay", "AdamApplyOneWithDecayAssign", "AddExt", "AddN", "Addcmul", "AsinhExt",
    "AssignAdd", "BiasAdd", "BiasAddGrad", "ClipByNormNoDivSum", "Cosh", "DivMod", "EluExt", "Erf", "FastGeLU",
    "FastGeLUGrad", "FillV2", "GeLU", "GeLUGrad", "HShrink", "HSigmoid", "HSwish", "LeakyReLUExt", "MeanExt", "Muls",
    "OnesLike", "ReLU", "ReduceMean", "ReluGrad", "RsqrtGrad", "SiLU", "SiLUGrad", "Sigmoid",
    "SigmoidCrossEntropyWithLogits", "SigmoidCrossEntropyWithLogitsGrad", "SigmoidGrad", "Sinh", "SoftplusExt",
    "SqrtGrad", "Square", "SquaredDifference", "SubExt", "SumExt", "Tanh", "TanhGrad", "Tile", "ZerosLike",
    "ZerosLikeExt",
)  # fmt: skip
