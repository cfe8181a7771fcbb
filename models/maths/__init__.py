"""Pure functions, tensors in and tensors out: schedules, steps, solvers, sampling, replay. No model is loaded here.

The tables name the components a config may choose. They import no torch, so that options can be read without it.
"""

from flowmill.configs.registry import Table

KERNELS = Table(
    {
        "ode": "flowmill.models.maths.transitions:ODE",
        "flow_sde": "flowmill.models.maths.transitions:FlowSDE",
        "dance_sde": "flowmill.models.maths.kernels:DanceSDE",
        "cps": "flowmill.models.maths.kernels:CPS",
        "precise": "flowmill.models.maths.kernels:Precise",
        "wan_sde": "flowmill.models.maths.kernels:WanSDE",
        "ddim": "flowmill.models.maths.kernels:FlowDDIM",
    },
    like="flowmill.models.maths.transitions:Kernel",
)
PLANS = Table(
    {
        "all": "flowmill.models.maths.schedules:AllSteps",
        "window": "flowmill.models.maths.schedules:Window",
        "subset": "flowmill.models.maths.schedules:Subset",
        "fraction": "flowmill.models.maths.schedules:RandomFraction",
        "final": "flowmill.models.maths.schedules:FinalOnly",
        "late": "flowmill.models.maths.schedules:LateStates",
        "branch": "flowmill.models.maths.schedules:BranchEveryStep",
    },
    like="flowmill.models.maths.schedules:Plan",
)
SOLVERS = Table(
    {"euler": "flowmill.models.maths.solvers:Euler", "dpm2": "flowmill.models.maths.solvers:DPMSolver2M"},
    like="flowmill.models.maths.solvers:Solver",
)
