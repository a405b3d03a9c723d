"""Around every S3 call: its deadline, its errors made ours, its answers closed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextvars import ContextVar

import aiohttp
from botocore.exceptions import ClientError, ParamValidationError

from tplr.errors import StoreError
from tplr.logging import TRACE, logger
from tplr.storage.s3_errors import CONNECTION_ERRORS, failure, refusal
from tplr.storage.s3_exchange import DeadlineExceeded

_answers: ContextVar[list[aiohttp.ClientResponse]] = ContextVar("answers of the call under way")


@contextlib.asynccontextmanager
async def translate_errors(bucket: str, key: str, seconds: float | None) -> AsyncIterator[None]:
    """Run the block for at most ``seconds``, or as long as it takes, and let only store errors out."""
    scope = asyncio.timeout(seconds)
    answers: list[aiohttp.ClientResponse] = []
    token = _answers.set(answers)
    try:
        async with scope:
            yield
    except ClientError as error:
        raise refusal(error.response, bucket, key) from error
    except ParamValidationError as error:
        raise StoreError(f"a request that S3 does not know: {error}", bucket=bucket, key=key) from error
    except CONNECTION_ERRORS as error:
        raise failure(error, bucket, key, expired=scope.expired() or isinstance(error, DeadlineExceeded)) from error
    finally:
        _answers.reset(token)
        for answer in answers:
            # Gives the connection back if the body was read to its end, and drops it otherwise.
            answer.close()


def close_with_call(answer: aiohttp.ClientResponse) -> None:
    """Close ``answer`` when the border is left: botocore drops the answers that it can't parse unclosed."""
    logger.log(TRACE, "%s %s: %d", answer.method, answer.url.path, answer.status)
    _answers.get().append(answer)
