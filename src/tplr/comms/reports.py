"""Documents that nodes publish about themselves: reports, scores, evaluations, software."""

from tplr.comms.buckets import NodeBuckets
from tplr.exchange import scores
from tplr.exchange.documents import get_document, put_document
from tplr.exchange.envelope import WHOLE_RUN
from tplr.keys import debug_key, evaluation_key, software_key
from tplr.schemas import DebugReport, EvaluationResult, ScoreReport, ScoreSeal, Software


class ReportExchange(NodeBuckets):
    """Signed documents of this node and of others."""

    async def put_report(self, report: DebugReport) -> None:
        """Publish this node's report of a window."""
        key = debug_key(report.window, self.uid, self._version)
        await put_document(self.own_store, key, report, window=report.window, signer=self.signer)

    async def get_report(self, uid: int, window: int) -> DebugReport:
        """Read the report of ``uid`` for a window. Raises as ``get_document``, and ObjectNotFound without a bucket."""
        key = debug_key(window, uid, self._version)
        return await get_document(self._store_of(uid), key, DebugReport, window=window, author=self.author(uid))

    async def put_scores(self, report: ScoreReport) -> None:
        """Publish this validator's observations and scores of a window."""
        await scores.put_scores(self.own_store, report, self.signer)

    async def put_scores_seal(self, seal: ScoreSeal) -> None:
        """Publish the hash of a score report before the report. Raises PreconditionFailed if another hash exists."""
        await scores.put_seal(self.own_store, seal, self.signer)

    async def get_scores(self, uid: int, window: int) -> ScoreReport:
        """Read validator ``uid``'s observations and scores of a window.

        Raises:
            ObjectNotFound: it has no bucket, or has not scored the window.
            ScoresSealed: an ObjectNotFound; the scores are sealed.
            PayloadError, StoreError: as ``exchange.scores.get_scores``.
        """
        return await scores.get_scores(self._store_of(uid), window, self.author(uid), self._hparams)

    async def put_evaluation(self, result: EvaluationResult) -> None:
        """Publish this node's evaluation of the run's model after a window; replaces an earlier one."""
        key, mine = evaluation_key(result.window, self.uid, self._version), result.model_copy(update={"uid": self.uid})
        await put_document(self.own_store, key, mine.sealed(), window=result.window, signer=self.signer)

    async def get_evaluation(self, uid: int, window: int) -> EvaluationResult:
        """Read the evaluation by ``uid`` of the run's model after a window. Raises as ``get_report``."""
        key = evaluation_key(window, uid, self._version)
        return await get_document(self._store_of(uid), key, EvaluationResult, window=window, author=self.author(uid))

    async def put_software(self, software: Software) -> None:
        """Publish this node's software versions."""
        await put_document(self.own_store, software_key(self.uid), software, window=WHOLE_RUN, signer=self.signer)

    async def get_software(self, uid: int) -> Software:
        """Read the software versions of ``uid``. Raises as ``get_document``, and ObjectNotFound without a bucket."""
        return await get_document(
            self._store_of(uid), software_key(uid), Software, window=WHOLE_RUN, author=self.author(uid)
        )
