"""Pure functions, tensors in and tensors out: schedules, steps, solvers, sampling, replay. No model is loaded here.

The tables name the components a config may choose. They import no torch, so that options can be read without it.
"""

from __future__ import annotations

from configs.registry import Table

KERNELS = Table(
    {
        "ode": "models.maths.transitions:ODE",
        "flow_sde": "models.maths.transitions:FlowSDE",
        "dance_sde": "models.maths.kernels:DanceSDE",
        "cps": "models.maths.kernels:CPS",
        "precise": "models.maths.kernels:Precise",
        "wan_sde": "models.maths.kernels:WanSDE",
        "ddim": "models.maths.kernels:FlowDDIM",
    },
    like="models.maths.transitions:Kernel",
)
PLANS = Table(
    {
        "all": "models.maths.schedules:AllSteps",
        "window": "models.maths.schedules:Window",
        "subset": "models.maths.schedules:Subset",
        "fraction": "models.maths.schedules:RandomFraction",
        "final": "models.maths.schedules:FinalOnly",
        "late": "models.maths.schedules:LateStates",
        "branch": "models.maths.schedules:BranchEveryStep",
    },
    like="models.maths.schedules:Plan",
)
SOLVERS = Table(
    {"euler": "models.maths.solvers:Euler", "dpm2": "models.maths.solvers:DPMSolver2M"},
    like="models.maths.solvers:Solver",
)
