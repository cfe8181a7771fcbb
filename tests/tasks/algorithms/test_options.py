"""Defaults of algorithms, kernels and plans are the published ones, bounds hold, and they ask for what they need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flowmill.configs.errors import ConfigError
from flowmill.configs.load import load_config
from flowmill.configs.registry import Table, create, resolve
from flowmill.models.maths import KERNELS, PLANS
from flowmill.tasks.algorithms import ALGORITHMS, TOKEN_ALGORITHMS
from flowmill.tasks.algorithms.base import BehaviorDecay, ForwardTimes, Requirements
from flowmill.tasks.algorithms.checks import switched_off, without_effect
from flowmill.tasks.algorithms.crd import crd_error
from flowmill.tasks.algorithms.objectives import awm_log_prob, nft_loss
from tests.conftest import ROOT
from tests.support.option_types import option_types, owner, stated

KL = {"kl_coef": 0.0, "kl": "gaussian", "kl_reference": "base"}
RATIO = {
    **KL,
    "clip_range": 1e-4,
    "clip_low": None,
    "clip_high": None,
    "surrogate": "clip",
    "reduce": "mean",
    "from_means": False,
}
FORWARD = {"times": {}, "kl_coef": 0.0}
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("algorithm", "grpo"): RATIO,
    ("algorithm", "tempflow"): RATIO,
    ("algorithm", "flash_grpo"): RATIO,
    ("algorithm", "grpo_guard"): {**RATIO, "clip_range": 2e-6, "divide_by_dt": True},
    ("algorithm", "flow_dppo"): {**KL, "threshold": 1e-5},
    ("algorithm", "nft"): {**FORWARD, "beta": 1.0, "scale": 5.0, "decay": {}},
    ("algorithm", "awm"): {**FORWARD, "clip_range": 1.0, "weighting": "uniform", "power": 0.25},
    ("algorithm", "v_grpo"): {**FORWARD, "clip_range": 1.0, "weighting": "adaptive", "decay": {}},
    ("algorithm", "dpo"): {**FORWARD, "beta": 2000.0, "winner_margin": None},
    ("algorithm", "dgpo"): {**FORWARD, "beta": 100.0, "clip_range": 1e-2},
    ("algorithm", "crd"): {
        **FORWARD,
        "beta": 1.0,
        "scale": 5.0,
        "distance": "mse",
        "temperature": -1.0,
        "public_pools": False,
        "adaptive": True,
        "decay": {},
        "detach_center": False,
    },
    ("algorithm", "ram"): {**FORWARD, "multiplier": 100.0, "decay": {"rate": 0.01, "maximum": 0.9}},
    ("algorithm", "reward_gradient"): {**FORWARD, "target": "bounded", "strength": 0.3},
    ("algorithm", "refl"): {"steps": 1, "truncate": False, "margin": None, "scale": 1.0, "kl_coef": 0.0},
    ("algorithm", "direct_align"): {
        **FORWARD,
        "step": 0.25,
        "positive": (),
        "negative": (),
        "denoising": (0.1, 0.25),
        "inverting": (0.3, 0.01),
        "margin": None,
        "scale": 1.0,
    },
    ("algorithm", "fdfo"): {"clip_range": 0.03, "kl_coef": 0.0},
    ("kernel", "flow_sde"): {"noise_level": 0.7},
    ("kernel", "dance_sde"): {"eta": 0.3},
    ("kernel", "cps"): {"noise_level": 0.8, "log_prob": "gaussian"},
    ("kernel", "precise"): {"noise_level": 0.7, "noise": "flow"},
    ("kernel", "ddim"): {"eta": 0.7},
    ("plan", "window"): {"size": 2, "low": 0, "high": None, "mode": "random", "stride": 1, "epochs_per_shift": 1},
    ("plan", "subset"): {"count": 1, "candidates": None},
    ("plan", "branch"): {"branches": 4, "steps": None},
    ("plan", "all"): {"last": "ode", "keep_final": False},
}
TABLES = {"algorithm": ALGORITHMS, "kernel": KERNELS, "plan": PLANS}


@pytest.mark.parametrize(("label", "name"), DEFAULTS)
def test_defaults(label: str, name: str) -> None:
    made = create(TABLES[label], name, {}, label=label)
    found = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    assert {key: found[key] for key in DEFAULTS[label, name]} == DEFAULTS[label, name]


def test_defaults_of_levels_and_decay() -> None:
    assert dataclasses.asdict(ForwardTimes()) == {
        "count": 4,
        "kind": "stratified",
        "low": 0.02,
        "high": 0.98,
        "power": 1.0,
        "shift": 1.0,
        "shared": False,
        "constant_noise": False,
    }
    assert dataclasses.asdict(BehaviorDecay()) == {"flat": 0, "rate": 0.0, "maximum": 0.0, "start": 0.0}


#: Bounds of numbers and choices by the types of options: of numbers without a bound, any value has a meaning.
STATED = {
    "> 0": """
        AWM.clip_range AWM.power BranchEveryStep.branches CRD.beta CRD.scale DAPO.clip_high DGPO.beta DGPO.clip_range
        DPO.beta DanceSDE.eta DirectAlign.scale FDFO.clip_range FlowDPPO.threshold FlowSDE.noise_level GSPO.clip_high
        KTO.beta KTO.desired_weight KTO.undesired_weight RatioClip.clip_high TokenKTO.beta
        TokenKTO.desired_weight TokenKTO.undesired_weight
        LateStates.count NFT.beta NFT.scale PPO.value_clip Precise.noise_level RAM.multiplier ReFL.scale ReFL.steps
        RewardGradient.strength Subset.count TokenDPO.beta TokenGRPO.constant Window.epochs_per_shift Window.size
        Window.stride""",
    ">= 0": """
        FDFO.kl_coef KL.kl_coef LateStates.low TokenDPO.likelihood TokenGRPO.kl_coef VelocityKL.ema_kl_coef
        VelocityKL.kl_coef Window.low""",
    "> 0, < 1": "GRPO.clip_range GRPOGuard.clip_range GSPO.clip_range RatioClip.clip_low RatioClip.clip_range",
    "> 0, <= 1": "DirectAlign.step FlowDDIM.eta RandomFraction.fraction",
    "> 0, <= 2": "CPS.noise_level",
    ">= 0, <= 1": "DPO.winner_margin",
    ">= 0, < 0.5": "TokenDPO.label_smoothing",
    "any number": """
        BranchEveryStep.steps CRD.temperature DirectAlign.margin
        LateStates.high ReFL.margin Subset.candidates TokenGRPO.tis TokenGRPO.tis_low Window.high""",
    "> -1": "DirectAlign.denoising DirectAlign.inverting",
    "base | average": "KL.kl_reference",
    "bounded | linear": "RewardGradient.target",
    "clip": "RLOO.surrogate",
    "clip | cispo | spo": "CISPO.surrogate TokenGRPO.surrogate",
    "clip | mask | mask_rows": "TokenGRPO.tis_outside",
    "clip | spo": "AWM.surrogate GRPO.surrogate",
    "constant": "DrGRPO.normalization",
    "flow | dance": "Precise.noise",
    "gaussian | flow_grpo | velocity | mean": "KL.kl",
    "gaussian | squared": "CPS.log_prob",
    "k1 | k2 | k3": "TokenGRPO.kl",
    "mean | sum": "GRPO.reduce",
    "mse | bce": "CRD.distance",
    "ode | sde": "RandomFraction.last",
    "ode | sde | train": "AllSteps.last",
    "product": "RLOO.ratio",
    "random | fixed | progressive": "Window.mode",
    "sequence_mean": "RLOO.normalization",
    "sigmoid | hinge | ipo": "TokenDPO.form",
    "token | sequence | product": "GSPO.ratio TokenGRPO.ratio",
    "token_mean | sequence_mean | constant": """
        CISPO.normalization DAPO.normalization PPO.normalization ReinforcePP.normalization TokenGRPO.normalization""",
    "velocity | epsilon | v_prediction | sample": "DPO.prediction KTO.prediction SFT.prediction",
    "uniform | t | t2 | huber | ghuber | adaptive": "AWM.weighting VGRPO.weighting",
}


def test_types_of_options_state_their_bounds_and_choices() -> None:
    found: dict[str, set[str]] = {}
    for table in (*TABLES.values(), TOKEN_ALGORITHMS):
        for kind, field, annotation in option_types(table):
            if limits := stated(annotation):
                found.setdefault(limits, set()).add(owner(kind, field.name))
    assert found == {limits: set(names.split()) for limits, names in STATED.items()}


#: Their rollout policy may follow the trained one slowly.
DECAYING = sorted(name for name in ALGORITHMS if "decay" in resolve(ALGORITHMS, name, label="x").__dataclass_fields__)
#: Decays that leave 0 to 1, and ones that would be 0 after every epoch.
DECAYS: list[dict[str, Any]] = [
    {"speed": 1},
    {"rate": -1, "maximum": 0.5},
    {"start": -0.1, "rate": 1, "maximum": 0.5},
    {"flat": -1, "rate": 1, "maximum": 0.5},
    {"start": 1.5, "maximum": 1.5},
    {"rate": 0.1, "maximum": -0.5},
]
IDLE_DECAYS = ({"rate": 0.01}, {"start": 0.5}, {"flat": 5}, {"maximum": 0.5}, {"flat": 5, "maximum": 0.5})
FORWARD_ALGORITHMS = ("nft", "awm", "v_grpo", "dpo", "dgpo", "crd", "ram", "reward_gradient", "direct_align")
#: Rules that no type states: component, option, values that are allowed, values that are refused.
RULES: list[tuple[str, str, str, list[Any], list[Any]]] = [
    *[("algorithm", name, "decay", [{}, {"rate": 0.1, "maximum": 0.5}], DECAYS) for name in DECAYING],
    ("algorithm", "refl", "truncate", [False], [True]),
    ("algorithm", "direct_align", "positive", [()], [("Real",)]),
    ("algorithm", "direct_align", "negative", [()], [("Oil",)]),
    ("algorithm", "direct_align", "denoising", [(0.1, 0.25)], [(0.1,), (-1.0, 0.2)]),
]
TIMES: list[dict[str, Any]] = [
    *({"count": 0}, {"low": 0.0}, {"high": 1.0}, {"low": 0.5, "high": 0.5}, {"low": 0.6, "high": 0.5}),
    {"kind": "power", "power": -0.1},
    *({"kind": "x"}, {"speed": 1}, {"low": -0.1}, {"high": 1.5}),
]
RULES += [
    ("algorithm", name, "times", [{}, {"count": 1}, {"low": 0.1, "high": 0.2}], TIMES) for name in FORWARD_ALGORITHMS
]


@pytest.mark.parametrize(("label", "name", "option", "allowed", "refused"), RULES)
def test_rules_that_no_type_states(label: str, name: str, option: str, allowed: list[Any], refused: list[Any]) -> None:
    for value in allowed:
        assert getattr(create(TABLES[label], name, {option: value}, label=label), option) == value
    for value in refused:
        with pytest.raises(ConfigError):
            create(TABLES[label], name, {option: value}, label=label)


#: Components, options that act only with others, and these.
BELONGING: list[tuple[Table, str, dict[str, Any], dict[str, Any]]] = [
    *[(TOKEN_ALGORITHMS, name, {"tis_low": 0.5}, {"tis": 2.0}) for name in ("grpo", "dapo", "ppo")],
    (TOKEN_ALGORITHMS, "grpo", {"tis_outside": "mask"}, {"tis": 2.0}),
    (ALGORITHMS, "direct_align", {"denoising": [0.3, 0.3]}, {"positive": ["a"], "negative": ["b"], "step": 0.01}),
    (ALGORITHMS, "direct_align", {"inverting": [0.3, 0.3]}, {"positive": ["a"], "negative": ["b"], "step": 0.01}),
    (ALGORITHMS, "crd", {"public_pools": True}, {"temperature": 0.0}),
    *[
        (ALGORITHMS, name, {"decay": idle}, {"decay": {"rate": 0.1, "maximum": 0.5}})
        for name in DECAYING
        for idle in IDLE_DECAYS
    ],
    *[
        (ALGORITHMS, name, {"times": {option: 2.0}}, {"times": {"kind": kind, option: 2.0}})
        for name in ("awm", "nft")
        for option, kind in (("power", "power"), ("shift", "logit_normal"))
    ],
    *[
        (ALGORITHMS, "nft", {"times": {"kind": kind, **bound}}, {"times": bound})
        for kind in ("grid", "logit_normal", "timesteps")
        for bound in ({"low": 0.1}, {"high": 0.9})
    ],
]


@pytest.mark.parametrize(("table", "name", "options", "others"), BELONGING)
def test_options_without_those_that_they_belong_to_are_named(
    table: Table, name: str, options: dict[str, Any], others: dict[str, Any]
) -> None:
    """A decay that is none is refused; an ablation may switch off what others belong to."""
    config = load_config(ROOT / "configs" / "digits.yaml")

    def idle(options: dict[str, Any]) -> list[str]:
        parts = (config, create(table, name, options, label="algorithm"), None)
        refusals, notes = [each.why for each in without_effect(*parts)], [*switched_off(*parts)]
        return refusals if "decay" in options else [*notes, *refusals]

    assert not idle({**options, **others})
    # Stored runs with such options can be read.
    (why,) = idle(options)
    assert next(iter(options)) in why


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """An algorithm of one's own whose option ``times`` is a number."""

    times: int = 4

    @property
    def requires(self) -> Requirements:
        return Requirements(data="forward", times=ForwardTimes(count=self.times))


def test_an_option_times_of_ones_own_may_be_anything() -> None:
    assert not [*without_effect(load_config(ROOT / "configs" / "digits.yaml"), Counted(times=2), None)]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("nft", {"decay": {"speed": 1}}, "option 'decay' has no option 'speed'"),
        ("nft", {"times": {"kind": "often"}}, "option 'times': kind is 'often'; it must be 'stratified'"),
    ],
)
def test_a_refusal_names_the_option_within_an_option(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        create(ALGORITHMS, name, options, label="algorithm")


def asked(name: str, **options: Any) -> Requirements:
    required: Requirements = create(ALGORITHMS, name, options, label="algorithm").requires
    return required


def test_what_algorithms_ask_for() -> None:
    compared: dict[str, Any] = {"min_group_size": 2, "approx_kl": True}
    for name in ("grpo", "tempflow"):
        assert asked(name) == Requirements(**compared)
        assert asked(name, from_means=True) == Requirements(**compared, old_means=True, densities=True)
        assert asked(name, reduce="sum") == Requirements(**compared, densities=True)
    assert asked("flash_grpo") == Requirements(**compared, densities=True)
    assert asked("flash_grpo", from_means=True) == asked("grpo_guard")
    assert asked("grpo_guard") == Requirements(**compared, old_means=True, densities=True)
    assert asked("flow_dppo") == Requirements(min_group_size=2, old_means=True, approx_kl=True)
    for name in ("grpo", "grpo_guard", "tempflow", "flash_grpo", "flow_dppo"):
        base, average = (asked(name, kl_coef=0.1, kl_reference=to) for to in ("base", "average"))
        assert (base.reference, base.average, base.zero_advantages) == (True, False, True)
        assert (average.reference, average.average, average.zero_advantages) == (False, True, True)
    taught: dict[str, Any] = {"zero_advantages": True, "advantages": False}
    assert asked("opd", teacher="folder") == Requirements(teachers=(("", "folder"),), **taught)
    several = asked("opd", teachers={"one": "a", "two": "b"}, kl_coef=0.1)
    assert several == Requirements(teachers=(("one", "a"), ("two", "b")), reference=True, **taught)
    for wrong in ({}, {"teacher": "a", "teachers": {"one": "b"}}, {"teachers": {"": "a"}}, {"teachers": {"one": 1}}):
        with pytest.raises(ConfigError, match="teachers"):
            asked("opd", **wrong)
    pairs: dict[str, Any] = {"unit": "pair", "min_group_size": 2, "finals": True, "same_noise": True, "behavior": True}
    assert asked("fdfo") == Requirements(**pairs, approx_kl=True)
    assert asked("fdfo", kl_coef=0.1) == Requirements(**pairs, approx_kl=True, reference=True, zero_advantages=True)
    levels, shared = ForwardTimes(count=7), ForwardTimes(count=7, shared=True)
    forward: dict[str, Any] = {"data": "forward", "min_group_size": 2}
    times = {"count": 7}
    assert asked("nft", times=times) == Requirements(**forward, times=levels, behavior=True, decay=BehaviorDecay())
    assert asked("awm", times=times) == Requirements(
        **forward, approx_kl=True, times=levels, behavior=True, decay=BehaviorDecay()
    )
    assert asked("dpo", times=times) == Requirements(**forward, times=shared, unit="pair", reference=True)
    still = ForwardTimes(count=7, shared=True, constant_noise=True)
    assert asked("dgpo", times=times) == Requirements(
        **forward, times=still, unit="group", reference=True, behavior=True, decay=BehaviorDecay()
    )
    assert asked("crd", times=times, decay={"rate": 0.1, "maximum": 0.5}) == Requirements(
        **forward, times=shared, unit="group", behavior=True, decay=BehaviorDecay(rate=0.1, maximum=0.5)
    )
    assert asked("v_grpo", times=times) == Requirements(
        **forward, approx_kl=True, times=shared, behavior=True, decay=BehaviorDecay()
    )
    assert asked("v_grpo", times={"shared": False}).times == ForwardTimes()
    assert asked("ram") == Requirements(
        **forward,
        times=ForwardTimes(count=8, kind="power"),
        reference=True,
        behavior=True,
        zero_advantages=True,
        decay=BehaviorDecay(rate=0.01, maximum=0.9),
    )
    for target in ("bounded", "linear"):
        needs = asked("reward_gradient", target=target, times=times)
        assert needs == Requirements(
            data="forward", times=levels, gradients=True, once=target == "linear", notes=needs.notes, **taught
        )
        assert len(needs.notes) == 2
        assert asked("reward_gradient", target=target, kl_coef=0.1).reference
    assert asked("ram", times={"count": 2, "kind": "grid"}).times == ForwardTimes(count=2, kind="grid")
    for name in ("nft", "awm", "crd", "dpo", "dgpo"):
        plain, penalized = asked(name), asked(name, kl_coef=0.1)
        assert (plain.zero_advantages, penalized.zero_advantages, penalized.reference) == (False, True, True)


def test_only_kto_estimates_a_reference_point() -> None:
    singles: dict[str, Any] = {"data": "forward", "min_group_size": 1, "times": ForwardTimes(), "reference": True}
    for name, estimated in (("kto", True), ("apo_zero", False)):
        assert asked(name) == Requirements(**singles, mismatched=estimated)


def test_what_algorithms_ask_for_that_climb_rewards() -> None:
    climbed: dict[str, Any] = {"rewards": 1, "zero_advantages": True, "advantages": False}
    refl = asked("refl", steps=3)
    assert refl == Requirements(data="states", calls=3, notes=refl.notes, **climbed)
    assert "monitors" in refl.notes[0]
    assert asked("refl", kl_coef=0.1).reference
    assert asked("refl", ema_kl_coef=0.1).average
    aligned = asked("direct_align", times={"count": 7})
    assert aligned == Requirements(data="forward", times=ForwardTimes(count=7), notes=aligned.notes, **climbed)
    assert asked("direct_align", kl_coef=0.1).reference
    words: dict[str, Any] = {"positive": ["Real"], "negative": ["Oil"], "step": 0.1}
    assert asked("direct_align", **words, times={"high": 0.89}).rewards == 2
    for times in ({"high": 0.9}, {"kind": "grid"}):
        with pytest.raises(ConfigError, match="is inverted from every level"):
            asked("direct_align", **words, times=times)


def test_kernels_and_their_noise() -> None:
    noisy = {name for name in KERNELS if resolve(KERNELS, name, label="kernel").stochastic}
    assert noisy == set(KERNELS) - {"ode"}


@pytest.mark.parametrize("power", [0.25, 0.5])
def test_awm_scores_no_error_with_zero(power: float) -> None:
    time = torch.tensor([0.3, 0.9], dtype=torch.float64)
    for weighting in ("uniform", "t", "t2", "huber", "ghuber"):
        error = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        score = awm_log_prob(error, time, weighting, power)
        assert score.tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
        (slope,) = torch.autograd.grad(score.sum(), error)
        # d/dm of -m, -t m, -t^2 m, -sqrt(m + 1e-10) t, -(m + 1e-10)^p t / p at m = 0.
        ends = {"uniform": 1.0, "t": time, "t2": time**2, "huber": 0.5e5 * time}
        ends["ghuber"] = 1e-10 ** (power - 1) * time
        torch.testing.assert_close(slope, -torch.ones(2, dtype=torch.float64) * ends[weighting])


def test_errors_below_a_hundred_thousandth_are_divided_by_it() -> None:
    clean, time = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    off = torch.tensor([[2e-6] * 4, [3e-2] * 4], dtype=torch.float64)
    expected = [(2e-6) ** 2 / 1e-5, 3e-2]
    assert crd_error(off, clean, adaptive=True).tolist() == pytest.approx(expected, rel=1e-9)
    assert crd_error(off, clean, adaptive=False).tolist() == pytest.approx([4e-12, 9e-4], rel=1e-9)
    # x_t = 0 and x0 = 0, so that the estimate is -t v.
    one = torch.ones(2, dtype=torch.float64)
    assert nft_loss(2 * off, 2 * off, (clean, clean, time), one, 1.0).tolist() == pytest.approx(expected, rel=1e-9)
