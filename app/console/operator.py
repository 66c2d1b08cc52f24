"""Who may see the operators' pages: for everybody else they do not exist."""

from typing import Annotated

from fastapi import Depends, HTTPException, Request

from app.auth import SessionUser
from app.caller import Caller
from app.error_handlers import from_status


async def _operator(request: Request, caller: SessionUser) -> Caller:
    if caller.role != "operator":
        raise from_status(request, HTTPException(404))
    return caller


Operator = Annotated[Caller, Depends(_operator)]
"""Raises NotFound, with the words of a page that there is not."""
