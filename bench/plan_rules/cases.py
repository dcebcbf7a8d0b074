"""Workloads that the rules of thumb speak of, as questions to `baton plan ratio`. Rules name no SLO, model or GPU: these do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from extproc.plan.candidates import Kind
from extproc.plan.gpus import gpu
from extproc.plan.lengths import parse
from extproc.plan.question import TENSOR_PARALLEL, Question
from extproc.plan.ratio import Effort
from extproc.plan.shapes import shape_of
from extproc.plan.simulate import Slos
from extproc.plan.workload import Workload

EFFORT = Effort(seeds=5, requests=250, keep=3, finalists=2, screen_resolution=0.06, resolution=0.03)
SPLITS = Effort(seeds=3, requests=120, keep=1, finalists=2, screen_resolution=0.1, resolution=0.04)
SMALL = Effort(seeds=2, requests=30, keep=1, finalists=1, screen_resolution=0.3, resolution=0.2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question."""

    name: str
    rule: str
    """Which of the rules it is about: ``split`` or ``chunked``."""
    isl: int
    osl: int
    gpus: int
    ttft_s: float
    itl_s: float = 0.045
    tensor_parallel: tuple[int, ...] = TENSOR_PARALLEL
    said: str = ""
    """The ratio of GPUs that the rule names."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is compared."""
        return (Kind.NIXL,) if self.rule == "split" else (Kind.CHUNKED, Kind.NIXL)

    @property
    def effort(self) -> Effort:
        """How much is simulated. Answers of thousands of tokens take minutes to come: there only splits near the best."""
        return EFFORT if self.rule == "chunked" else replace(SPLITS, all_splits=self.osl < 1_000)

    @property
    def question(self) -> Question:
        """As it is asked."""
        return Question(
            shape=shape_of("llama-3.3-70b"),
            gpu=gpu("h200-sxm"),
            gpus=self.gpus,
            workload=Workload(
                inputs=parse(f"lognormal:mean={self.isl},cv=0.2", self.name),
                outputs=parse(f"lognormal:mean={self.osl},cv=0.2", self.name),
            ),
            slos=Slos(self.ttft_s, self.itl_s),
            weight_dtype="fp8",
            prefill_tp=self.tensor_parallel,
            decode_tp=self.tensor_parallel,
        )

    @property
    def command(self) -> str:
        """The same by hand."""
        tensor_parallel = "".join(f" --prefill-tp {size} --decode-tp {size}" for size in self.tensor_parallel)
        return (
            f"baton plan ratio --model llama-3.3-70b --weight-dtype fp8 --gpu h200 --gpus {self.gpus} "
            f"--isl lognormal:mean={self.isl},cv=0.2 --osl lognormal:mean={self.osl},cv=0.2 --ttft-slo {self.ttft_s:g} "
            f"--itl-slo {self.itl_s:g}{''.join(f' --arrangement {kind.name.lower()}' for kind in self.kinds)}"
            + (f"{tensor_parallel} --seeds {self.effort.seeds}" if self.rule == "split" else "")
            + (" --all-splits" if self.effort.all_splits else "")
        )


def _split(name: str, isl: int, osl: int, said: str) -> Case:
    return Case(name=name, rule="split", isl=isl, osl=osl, gpus=40, ttft_s=5.0, tensor_parallel=(4,), said=said)


CASES = (
    _split("long-in", 32_768, 400, "3:2"),
    _split("long-out", 4_096, 8_192, "1:3"),
    *(
        Case(
            name=f"chunked-{isl // 1024}k-{itl_ms}",
            rule="chunked",
            isl=isl,
            osl=500,
            gpus=8,
            ttft_s=1 + isl / 8_192,
            itl_s=itl_ms / 1e3,
        )
        for itl_ms, prompts in (
            (45, (2_048, 4_096, 8_192, 16_384)),
            (100, (4_096, 8_192)),
            (20, (8_192,)),
        )
        for isl in prompts
    ),
)
