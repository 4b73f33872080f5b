"""Design sections 5.1 to 5.8 through whole audits: verdicts, origins, findings, controls, numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.harness import kinds, modules, run_audit

racy = pytest.mark.usefixtures("racy")


def test_inputs_that_differ_are_no_verdict(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        def build_model(): return nn.Identity()
        def make_inputs(): return torch.tensor(list(os.urandom(16)))
        """,
    )
    assert (report.verdict, report.exit_code, report.origins) == ("inconclusive", 3, ())
    assert "inputs-differ" in kinds(report)


@racy
def test_a_difference_that_nobody_reads_is_masked_and_still_found(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.unread = Combine(True)
            def forward(self, x):
                self.unread(x)
                return x + 1
        def build_model(): return Model()
        """,
    )
    assert (report.verdict, report.exit_code, modules(report)) == ("nondeterministic", 1, ["unread"])
    assert report.distinct_outputs == 1
    assert "masked" in kinds(report)


@racy
def test_a_counter_in_the_racing_module_hides_nothing(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Counting(Combine):
            def forward(self, x):
                self.calls = getattr(self, "calls", 0) + 1
                return super().forward(x)
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.combine, self.head = Counting(True), nn.Tanh()
            def forward(self, x):
                self.calls = getattr(self, "calls", 0) + 1
                return self.head(self.combine(x))
        def build_model(): return Model()
        """,
    )
    assert modules(report) == ["combine"]
    (origin,) = report.origins
    assert (origin.sites, origin.operator, origin.healed) == (("out",), "aten.index_put_.default", True)
    assert origin.max_abs is not None
    assert "own state" not in str(origin.mechanism)


def test_what_a_counting_parent_sets_in_its_child_is_the_parents(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Scaled(nn.Module):
            def forward(self, x): return x * self.scale
        class Parent(nn.Module):
            def __init__(self):
                super().__init__()
                self.steps, self.child = 0, Scaled()
            def forward(self, x):
                self.steps += 1
                self.child.scale = 1 + self.steps * 1e-3
                return self.child(x)
        def build_model(): return nn.Sequential(Parent())
        """,
    )
    assert modules(report) == ["0"]
    assert report.origins[0].mechanism == "own state that already differed on entry: attr.steps"


@racy
def test_a_race_in_a_child_does_not_explain_what_the_parent_counts(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Parent(nn.Module):
            def __init__(self):
                super().__init__()
                self.steps, self.child = 0, Combine(True)
            def forward(self, x):
                self.steps += 1
                return self.child(x) * (1 + self.steps * 1e-3)
        def build_model(): return nn.Sequential(Parent())
        """,
    )
    child, parent = report.origins
    assert (child.module, child.operator) == ("0.child", "aten.index_put_.default")
    assert (parent.module, parent.operator) == ("0", None)
    assert "attr.steps" in str(parent.mechanism)


@racy
def test_a_root_that_races_is_held_fixed_with_all_that_is_in_it(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Root(Combine):
            def __init__(self):
                super().__init__(True)
                self.head = nn.Tanh()
            def forward(self, x): return self.head(super().forward(x))
        def build_model(): return Root()
        """,
    )
    assert [(origin.module, origin.healed) for origin in report.origins] == [("", True)]


@racy
def test_a_difference_made_between_modules_is_nobodys(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.before, self.after = nn.Tanh(), nn.Sigmoid()
        def build_model():
            return Model()
        def run_model(model, x):
            block = Combine(True)
            return model.after(combine_racing(model.before(x).repeat(8, 1), block.target, len(x)))
        """,
    )
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    [finding] = [f for f in report.findings if f.kind == "unobserved-producer"]
    assert "before" in finding.message
    assert "after" in finding.message


@racy
def test_own_code_of_a_container(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Tanh(), nn.Sigmoid()
                self.table = Combine(True)
            def forward(self, x):
                y = self.first(x).repeat(8, 1)
                return self.last(combine_racing(y, self.table.target, len(x)))
        def build_model(): return nn.Sequential(nn.Tanh(), Own())
        """,
    )
    [origin] = report.origins
    assert (origin.module, origin.part, origin.after) == ("1", "own-code", "1.first")
    assert origin.operator == "aten.index_put_.default"


@racy
def test_an_excluded_child_is_said_to_be_a_possibility(tmp_path: Path) -> None:
    source = """
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.child = Combine(True)
            def forward(self, x):
                return self.child(x)
        def build_model(): return nn.Sequential(Outer())
        """
    assert modules(run_audit(tmp_path, source)) == ["0.child"]
    report = run_audit(tmp_path, source, exclude=("*.child",))
    assert modules(report) == ["0"]
    assert "own code or excluded children" in str(report.to_json())


@racy
def test_all_independent_origins_are_reported(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right, self.sum = Combine(True), Combine(True), nn.Tanh()
            def forward(self, x):
                return self.sum(self.left(x) + self.right(x + 1))
        def build_model(): return Two()
        """,
    )
    assert modules(report) == ["left", "right"]
    assert all(origin.healed for origin in report.origins)


def test_another_sequence_of_calls_is_control_flow(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        TURN = [0]
        class Branching(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.tail = nn.Tanh(), nn.Tanh(), nn.ReLU()
            def forward(self, x):
                TURN[0] += 1
                return self.tail(self.a(x) if TURN[0] % 2 else self.b(x))
        def build_model(): return nn.Sequential(Branching())
        """,
    )
    [finding] = [f for f in report.findings if f.kind == "control-flow"]
    assert finding.module == "0"
    assert report.distinct_outputs == 1


def test_own_state_that_a_run_left_behind(tmp_path: Path) -> None:
    source = """
        class Counter(nn.Module):
            def __init__(self):
                super().__init__()
                self.calls = 0
            def forward(self, x):
                self.calls += 1
                return x + self.calls
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.counter, self.tail = Counter(), nn.Tanh()
            def forward(self, x):
                return self.tail(self.counter(x))
        def build_model(): return Outer()
        """
    report = run_audit(tmp_path, source)
    assert (report.verdict, modules(report)) == ("nondeterministic", ["counter"])
    assert "history-dependent" in kinds(report)


@pytest.mark.slow
def test_hidden_state_is_told_from_a_race_by_two_fresh_processes(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        CALLS = []
        class Remembering(nn.Module):
            def forward(self, x):
                CALLS.append(1)
                return x + len(CALLS)
        def build_model(): return nn.Sequential(Remembering())
        def make_inputs(): return torch.ones(4)
        """,
        prelude="import torch\nfrom torch import nn\n",
        runs=3,
        history=True,
    )
    assert report.verdict == "nondeterministic"
    assert "history-dependent" in kinds(report)
    assert {condition.name for condition in report.conditions} >= {"in-process", "history-1", "history-2"}


def test_only_the_first_run_differs(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        WARM = []
        class Warming(nn.Module):
            def forward(self, x):
                WARM.append(1)
                return x + (len(WARM) == 1)
        def build_model(): return nn.Sequential(Warming())
        """,
    )
    assert (report.verdict, report.runs_differing) == ("nondeterministic", 1)
    assert "first-run-differs" in kinds(report)


def test_training_is_stateful_and_the_model_is_rebuilt(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        enable_grad = True
        def build_model():
            torch.manual_seed(0)
            return nn.Linear(512, 4)
        def run_model(model, x):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            return loss
        """,
    )
    assert report.verdict == "deterministic"
    assert "stateful" in kinds(report)
    assert report.restored["model"] == "rebuilt for every run"


@racy
def test_gradients_are_sites(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        enable_grad = True
        def build_model():
            torch.manual_seed(0)
            return nn.Sequential(Embed())
        def run_model(model, x):
            loss = model(x).sum()
            loss.backward()
            return loss.detach()
        """,
    )
    # The backward pass of indexing accumulates with index_put_, outside of any module's call.
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    [finding] = [f for f in report.findings if f.kind == "unobserved-producer"]
    assert "grad.0.table" in finding.message


def test_a_model_that_notices_the_hooks(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        ORIGINAL = nn.Module.__call__
        class Noticing(nn.Module):
            def forward(self, x):
                return x + (nn.Module.__call__ is not ORIGINAL)
        def build_model(): return nn.Sequential(Noticing())
        """,
    )
    assert report.verdict == "nondeterministic"
    assert "observer-effect" in kinds(report)


def test_a_model_without_modules(tmp_path: Path) -> None:
    report = run_audit(tmp_path, "def build_model(): return lambda x: x * 2")
    assert (report.verdict, report.exit_code) == ("deterministic", 0)
    assert report.rate.high == pytest.approx(1 - 0.05 ** (1 / 5))


def test_one_run_compares_nothing(tmp_path: Path) -> None:
    report = run_audit(tmp_path, "def build_model(): return nn.Tanh()", runs=1)
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)
    assert report.rate.estimate is None


def test_nothing_observed_is_inconclusive(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Silent(nn.Module):
            def forward(self, x): return None
        def build_model(): return Silent()
        """,
        exclude=("*",),
    )
    assert report.exit_code in (0, 3)


def test_inputs_changed_in_place_do_not_reach_the_next_run(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        FIXED = inputs()
        class Doubling(nn.Module):
            def forward(self, x): return x.mul_(2)
        def build_model(): return Doubling()
        def make_inputs(): return FIXED
        """,
    )
    assert report.verdict == "deterministic"
    assert "mutates-input" in kinds(report)


def test_a_generator_that_only_the_survey_finds_is_put_back(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        class Hidden:
            generator = torch.Generator().manual_seed(3)
        class Noisy(nn.Module):
            def forward(self, x): return x + torch.randn(x.shape, generator=Hidden.generator)
        def build_model(): return nn.Sequential(Noisy())
        """,
    )
    assert report.verdict == "deterministic"
    assert any("first used by" in name for name in report.restored["generators"])


def test_the_targets_prints_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_audit(
        tmp_path,
        """
        def build_model():
            print("hello from the target")
            return nn.Tanh()
        """,
    )
    assert "hello" not in capsys.readouterr().out
    [output] = tmp_path.glob("*.detaudit.d/output.txt")
    assert "hello from the target" in output.read_text()


@racy
def test_an_origin_behind_another_is_found_once_the_first_is_held_fixed(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        def build_model(): return nn.Sequential(Combine(True), nn.Tanh(), Combine(True), nn.Tanh())
        """,
    )
    first, second = report.origins
    assert (first.module, first.condition) == ("0", None)
    assert (second.module, second.condition, second.comparisons) == ("2", "held-fixed-1", 3)
    assert second.max_ulp
    assert first.healed is second.healed is True


NOISE = """
def noise():
    return int.from_bytes(os.urandom(4), "little")

class Producer(nn.Module):
    def forward(self, x):
        return x + noise()

class Consumer(nn.Module):
    def forward(self, parts):
        return sum(parts) * 2

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.producer, self.consumer = Producer(), Consumer()
    def forward(self, x):
        return self.consumer(PASS(self.producer(x)))

def build_model():
    return Model()
"""


def test_a_number_from_the_host_is_no_uninitialised_memory(tmp_path: Path) -> None:
    report = run_audit(tmp_path, NOISE.replace("PASS", ""))
    [origin] = report.origins
    assert origin.module == "producer"
    assert origin.mechanism is not None
    assert "aten.add.Tensor is given host values that differ (args[1])" in origin.mechanism
    assert "uninitialised-memory" not in kinds(report)


def test_inputs_that_nobody_saw_are_no_uninitialised_memory(tmp_path: Path) -> None:
    report = run_audit(tmp_path, NOISE.replace("PASS(self.producer(x))", "(y for y in [self.producer(x)])"))
    assert modules(report) == ["producer"]
    [finding] = [f for f in report.findings if f.kind == "unobserved-producer"]
    assert finding.module == "consumer"
    assert "uninitialised-memory" not in kinds(report)
