"""The report of `heal`: one line per evaluation during training, and a table of the results."""

from rich.console import RenderResult
from rich.text import Text

from ..terminal import say
from ..training.heal import Healed
from ..training.loop import TrainingStep
from ..training.runs import HeldOutFigures, Outcome
from .quantities import counted, duration
from .sheets import Sheet, SheetRow, Terminal, drawing


class Healing:
    """A printer of the progress of the training runs. It prints nothing if `quiet` is true."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def start(self, trained: str, original: HeldOutFigures, start: HeldOutFigures) -> None:
        """Print the figures of the original model and of the changed model before training.

        `trained` says in words which parameters are trained.
        """
        lines = [
            f"held-out loss: the original {original.loss:.4f} nats per token, changed {start.loss:.4f}",
            f"KL from the original {start.kl:.4f} nats per token; parameters to train: {trained}",
            "",
            f"{'run':<20}{'step':>8}{'loss':>10}{'held out':>10}{'time':>9}",
        ]
        say(lines, self.quiet)

    def step(self, name: str, step: TrainingStep) -> None:
        """Print a line about a training step, if the model was evaluated after it. `name` is the name of the run."""
        if step.held_out is not None:
            row = f"{name:<20}{step.step:>8,}{step.loss:>10.4f}{step.held_out:>10.4f}{duration(step.seconds):>9}"
            say([row], self.quiet)


@drawing
def healing_report(terminal: Terminal, healed: Healed) -> RenderResult:
    """Yield the results of all runs for the terminal."""
    yield ""
    recovered = healed.recovered
    share = "There was no gap" if recovered is None else f"{100 * recovered:.1f} % of the gap in KL is closed"
    if healed.kept and recovered is not None:
        share = "Training did not bring the model closer; it is written unchanged"
    change = f"{healed.start.kl:.4f} → {healed.healed.kl:.4f} nats per token"
    yield Text(terminal.clean(f"{share}: {change}"), style="bold")
    yield ""
    rows = [
        SheetRow("original", _start_cells(healed.original)),
        SheetRow("changed, before", _start_cells(healed.start)),
        SheetRow("changed, healed", _run_cells(healed.healed)),
    ]
    rows += [] if healed.control is None else [SheetRow("control: original, trained", _run_cells(healed.control))]
    rows += [] if healed.floor is None else [SheetRow("floor: changed, from random", _run_cells(healed.floor))]
    yield Sheet("held out", ("KL", "±", "loss", "perplexity", "time"), tuple(rows))
    yield ""
    budget = f"{healed.tokens:,} tokens per run, {counted(healed.seeds, 'seed')}"
    local = f"; layers trained first by themselves: {len(healed.local)}" if healed.local else ""
    spread = "± is the largest minus the smallest over seeds"
    yield terminal.note(f"{budget}; {healed.trained:,} parameters trained{local}; {spread}")
    for name, outcome in (("changed", healed.healed), ("control", healed.control)):
        if outcome is not None:
            yield terminal.note(f"{name}: learning rate {outcome.rate:.2g}{_trials(outcome)}")
    yield terminal.note(f"written: {healed.folder}")


def _trials(outcome: Outcome) -> str:
    """Return words on the trials that chose the learning rate: the rate and the loss of every trial."""
    losses = [(trial.rate, "not finite" if trial.loss is None else f"{trial.loss:.4f}") for trial in outcome.tried]
    trials = ", ".join(f"{rate:.2g} → {loss}" for rate, loss in losses)
    return f", chosen by trials: {trials}" if trials else ""


def _start_cells(model: HeldOutFigures) -> tuple[str, ...]:
    return (f"{model.kl:.4f}", "", f"{model.loss:.4f}", f"{model.perplexity:.2f}", "")


def _run_cells(outcome: Outcome) -> tuple[str, ...]:
    mean = HeldOutFigures(outcome.kl, outcome.loss)
    spread = f"{outcome.kl_spread:.4f}" if len(outcome.runs) > 1 else "–"
    return (f"{mean.kl:.4f}", spread, f"{mean.loss:.4f}", f"{mean.perplexity:.2f}", duration(outcome.seconds))
