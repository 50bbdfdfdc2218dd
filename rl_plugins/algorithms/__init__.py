"""The RL mathematics as pure functions of tensors.

Nothing here knows Lightning, Ray or a configuration object. Tensors are named by axis: `B` samples, `T`
response tokens. Each kind has one table of names (`ADVANTAGES`, `POLICY_LOSSES`, `KL_ESTIMATORS`,
`AGGREGATIONS`), used where a configuration must name a function by a string.
"""
