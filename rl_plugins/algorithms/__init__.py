"""Mathematics of RL as pure functions of tensors.

No module here imports Lightning or Ray, and `config.settings` with its checks of numbers is the only import of a
configuration module. Tensors are named by axis: `B` samples, `T` response tokens. `inputs` describes every tensor once.
Each kind of function has a table of names (`ADVANTAGES`, `POLICY_LOSSES`, `KL_ESTIMATORS`, `AGGREGATIONS`) for
configurations, which name a function by a string.
"""
