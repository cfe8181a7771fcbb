"""The stages that a command or a deployment runs when it names one stage."""

from __future__ import annotations

from flowmill.configs.errors import ConfigError
from flowmill.configs.fingerprint import fingerprint
from flowmill.tasks.runs.chain import Chain
from flowmill.tasks.runs.context import RunContext
from flowmill.tasks.specs.graph import Node
from flowmill.tasks.specs.stages import STAGES

#: Settings that identify the run: a stage with other values would belong to another run.
_OF_THE_RUN = (
    *("model.policy", "model.path", "model.revision", "model.single_file", "model.build", "model.lora"),
    *("model.quantize", "run.seed", "run.name"),
)


def named_stages(context: RunContext, node: Node, *, evaluation: str = "") -> list[Node]:
    """Return the nodes to run for a stage that the user names, in order.

    ``score`` and ``gradient`` without a slot mean every reward. ``evaluate`` is followed by its judges. With settings
    other than the run's, an evaluation gets its own name, and prompts that the run lacks are encoded first.

    Args:
        context: the run, with the requested settings.
        evaluation: a name for an additional evaluation.
    """
    spec = STAGES[node.stage]
    evaluates = spec.scope == "evaluation"
    if evaluation and not evaluates:
        raise ConfigError(f"--name is for evaluations; stage '{node.stage}' has none.")
    if not all(char.isalnum() or char in "-_." for char in evaluation):
        raise ConfigError(f"--name '{evaluation}' must consist of letters, digits, '-', '_' and '.'.")
    first = _prompts_first(context, node)
    if spec.slotted and spec.scope == "epoch" and not node.slot:
        return [*first, *(context.plan.of_stage(node.epoch, node.stage) or [node])]
    if spec.slotted and spec.scope == "run" and not node.slot:
        return [each for each in context.plan.setup() if each.stage == node.stage]
    if not evaluates or node.slot or not spec.slotted:
        return [*first, node]
    name = evaluation or _own_name(context, node.epoch)
    nodes = list(context.plan.evaluation(node.epoch, name))
    # The images of the run's own evaluation exist; an evaluation with a name is a record of the same images.
    return [*first, *(nodes if node.stage == "evaluate" or name else nodes[1:])]


def _prompts_first(context: RunContext, node: Node) -> list[Node]:
    """Return the stages that add prompts the run lacks; ConfigError if the settings belong to another run."""
    own = context.chain.own
    if own is None or (node.epoch == 0 and STAGES[node.stage].scope != "evaluation"):
        return []
    ours, theirs = context.config.model_dump(mode="json"), own.config.model_dump(mode="json")
    for key in _OF_THE_RUN:
        section, name = key.split(".")
        if ours[section][name] != theirs[section][name]:
            raise ConfigError(
                f"--set {key}: this setting identifies the run '{context.run.name}', so no stage of it can have "
                "another. Start a run of another name: flowmill run CONFIG --name NAME --set ..."
            )
    done = context.chain.find(0, "preprocess") is not None
    return [] if done else [Node(0, "encode"), Node(0, "preprocess")]


def _own_name(context: RunContext, epoch: int) -> str:
    """Return '' if the settings give the run's own evaluation, else a name derived from them."""
    chain, own = context.chain, context.chain.own
    if own is None:
        return ""
    ours = {node: _work(chain, node) for node in context.plan.evaluation(epoch)}
    if ours == {node: _work(own, node) for node in own.plan.evaluation(epoch)}:
        return ""
    return f"set-{fingerprint(sorted(f'{node} {work}' for node, work in ours.items()))[:6]}"


def _work(chain: Chain, node: Node) -> str:
    return chain.target(node).fingerprint
