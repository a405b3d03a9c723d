"""A folder of evaluation results: one file per model and set of tasks, so that nothing is evaluated twice."""

from pathlib import Path

from tplr.errors import PayloadError
from tplr.files import atomic_write
from tplr.logging import logger
from tplr.schemas import EvaluationResult
from tplr.seeds import hash_parts
from tplr.untrusted import parse_untrusted

NAME_HASH = 12  # digits of the hash in a name


def result_path(folder: Path, version: str, window: int, asked: str) -> Path:
    """Return the path of the result for a window's model; ``asked`` identifies the evaluation."""
    return folder / f"evaluation-{window}-v{version}-{hash_parts('evaluation', asked)[:NAME_HASH]}.json"


def write_result(path: Path, result: EvaluationResult) -> None:
    """Write a result. Raises StateError."""
    atomic_write(path, result.sealed().model_dump_json(indent=1).encode())


def read_result(path: Path) -> EvaluationResult | None:
    """Read the result in a file. Returns None if there is no file, or if it is damaged or changed, which is logged."""
    if not path.exists():
        return None
    try:
        result = parse_untrusted(path.read_bytes()[: EvaluationResult.max_bytes], EvaluationResult, str(path))
    except PayloadError as error:
        logger.warning("result not used: %s", error)
        return None
    if result.seal != result.sealed().seal:
        logger.warning("result not used: %s: its seal does not match, it was changed", path)
        return None
    return result


def read_results(folder: Path) -> list[EvaluationResult]:
    """Read all valid results in a folder, by window."""
    found = [read_result(path) for path in sorted(folder.glob("evaluation-*.json"))]
    return sorted((one for one in found if one is not None), key=lambda one: one.window)


def results_of(folder: Path, *, digest: str) -> list[EvaluationResult]:
    """Read the results of the model with this digest."""
    return [one for one in read_results(folder) if one.digest == digest]
