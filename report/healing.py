"""heal, for the terminal: a row an evaluation on the way, and what came of it in a table."""

from rich.console import RenderResult
from rich.text import Text

from ..terminal import say
from ..training.heal import Healed
from ..training.loop import Step
from ..training.runs import Held, Outcome
from .quantities import duration
from .sheets import Sheet, SheetRow, Terminal, drawing


class Healing:
    """What a person sees of the runs."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def start(self, trained: str, original: Held, start: Held) -> None:
        """Tell what begins."""
        lines = [
            f"held-out loss: the original {original.loss:.4f} nats per token, changed {start.loss:.4f}",
            f"KL from the original {start.kl:.4f} nats per token; parameters to train: {trained}",
            "",
            f"{'run':<20}{'step':>8}{'loss':>10}{'held out':>10}{'time':>9}",
        ]
        say(lines, self.quiet)

    def step(self, name: str, step: Step) -> None:
        """Tell a step of a run, where it was evaluated."""
        if step.held_out is not None:
            row = f"{name:<20}{step.step:>8,}{step.loss:>10.4f}{step.held_out:>10.4f}{duration(step.seconds):>9}"
            say([row], self.quiet)


@drawing
def healing_report(terminal: Terminal, done: Healed) -> RenderResult:
    """What rich prints when all runs have ended."""
    yield ""
    recovered = done.recovered
    share = "There was no gap" if recovered is None else f"{100 * recovered:.1f} % of the gap in KL is gone"
    if done.kept and recovered is not None:
        share = "Training did not bring the model closer; it is written unchanged"
    budget = f"{done.tokens:,} tokens a run, {done.seeds} seed{'' if done.seeds == 1 else 's'}"
    yield Text(terminal.clean(f"{share}: {done.start.kl:.4f} → {done.healed.kl:.4f} nats per token"), style="bold")
    yield ""
    rows = [
        SheetRow("original", _cells(done.original)),
        SheetRow("changed, before", _cells(done.start)),
        SheetRow("changed, healed", _outcome(done.healed)),
    ]
    rows += [] if done.control is None else [SheetRow("control: original, trained", _outcome(done.control))]
    rows += [] if done.floor is None else [SheetRow("floor: changed, from random", _outcome(done.floor))]
    yield Sheet("held out", ("KL", "±", "loss", "perplexity", "time"), tuple(rows))
    yield ""
    local = f"; layers first: {len(done.local)}" if done.local else ""
    yield terminal.note(f"{budget}; {done.trained:,} parameters trained{local}; ± is the spread over seeds")
    for what, outcome in (("changed", done.healed), ("control", done.control)):
        if outcome is not None:
            yield terminal.note(f"{what}: rate {outcome.rate:.2g}{_trials(outcome)}")
    yield terminal.note(f"written: {done.folder}")


def _trials(outcome: Outcome) -> str:
    """Return the trials by which a rate was chosen, in words."""
    told = [f"{each.rate:.2g} → {'not finite' if each.loss is None else f'{each.loss:.4f}'}" for each in outcome.tried]
    return f", chosen by trials: {', '.join(told)}" if told else ""


def _cells(held: Held) -> tuple[str, ...]:
    return (f"{held.kl:.4f}", "", f"{held.loss:.4f}", f"{held.perplexity:.2f}", "")


def _outcome(outcome: Outcome) -> tuple[str, ...]:
    mean = Held(outcome.kl, outcome.loss)
    spread = f"{outcome.kl_spread:.4f}" if len(outcome.held) > 1 else "–"
    return (f"{mean.kl:.4f}", spread, f"{mean.loss:.4f}", f"{mean.perplexity:.2f}", duration(outcome.seconds))
