"""HTTP errors in the shape of vLLM 0.32. No I/O here."""

from __future__ import annotations

from typing import Any

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class ApiError(Exception):
    """An error answer."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """As the OpenAI endpoints answer it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def anthropic_body(self) -> dict[str, Any]:
        """As ``/v1/messages`` answers it, once the body was accepted."""
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


class PlainError(Exception):
    """What the web framework answers before vLLM's own handlers: ``{"detail": ...}``."""

    def __init__(self, detail: str, status: int) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = status


def invalid(message: str, parameter: str | None = None, value: object = None) -> ApiError:
    """A value that vLLM's own checks refuse."""
    extras = [f"{name}={shown}" for name, shown in (("parameter", parameter), ("value", value)) if shown is not None]
    return ApiError(f"{message} ({', '.join(extras)})" if extras else message, param=parameter)


def unknown_model(model: object, served: tuple[str, ...]) -> ApiError:
    """No such model here."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}."
    return ApiError(message, status=404, kind="NotFoundError", param="model")


def internal(message: str = "Internal server error") -> ApiError:
    """The engine failed: a transfer that did not come, a dead engine."""
    return ApiError(message, status=500, kind="InternalServerError")
