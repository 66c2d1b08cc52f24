"""Whose row it is, is decided in one place: the rule of `tenant_rule`, and proof that it bites."""

from pathlib import Path

import pytest

from tests.security.tenant_rule import problems

APP = Path(__file__).resolve().parents[2] / "app"

MODELS = """
class Adapter(Base):
    __tablename__ = "adapters"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))

class Check(Base):
    __tablename__ = "checks"
    id: Mapped[str] = mapped_column(primary_key=True)
    adapter_id: Mapped[str] = mapped_column(String(40), ForeignKey("adapters.id"))

class BaseModel(Base):
    __tablename__ = "base_models"
    digest: Mapped[str] = mapped_column(primary_key=True)
"""


def breaches(folder: Path, file: str, source: str) -> list[str]:
    """What the rule says of a package that has MODELS and this file."""
    package = folder / "shop"
    (package / "adapters").mkdir(parents=True)
    (package / "adapters" / "models.py").write_text(MODELS)
    (package / "adapters" / file).write_text(source)
    return [problem.what for problem in problems(package)]


def test_the_control_plane_keeps_the_rule() -> None:
    assert [str(problem) for problem in problems(APP)] == []


class TestOutsideARepository:
    @pytest.mark.parametrize(
        "query",
        [
            "session.scalars(select(Adapter))",
            "session.execute(sa.select(Adapter.id).where(Adapter.name == name))",
            "session.get(Adapter, name)",
            "session.get_one(Check, name)",
            "session.execute(update(Adapter).values(name=name))",
            "session.execute(delete(Adapter).where(Adapter.tenant_id == tenant_id))",
            "session.execute(select(func.count()).select_from(Adapter))",
            "session.scalars(select(other).join(Adapter))",
            "session.get(BaseModel, name)",
        ],
    )
    def test_no_model_is_queried_even_with_a_tenant(self, tmp_path: Path, query: str) -> None:
        source = f"async def find(session, tenant_id, name):\n    return await {query}\n"
        (found,) = breaches(tmp_path, "service.py", source)
        assert "outside a repository" in found

    def test_making_and_adding_a_row_is_no_query(self, tmp_path: Path) -> None:
        source = (
            "def make(session, caller):\n    session.add(Adapter(tenant_id=caller.tenant_id))\n"
        )
        assert breaches(tmp_path, "service.py", source) == []


class TestInARepository:
    @pytest.mark.parametrize(
        "function",
        [
            "async def all(session):\n    return await session.scalars(select(Adapter))\n",
            "async def get(session, id):\n    return await session.get(Adapter, id)\n",
            "async def of(session, id):\n    return await session.scalars(select(Check))\n",
            # the parameter is there, and nothing is done with it
            "async def all(session, tenant_id):\n"
            "    return await session.scalars(select(Adapter))\n",
            # a column is no tenant's id
            "async def all(session):\n"
            "    return await session.scalars(select(Adapter).order_by(Adapter.tenant_id))\n",
            # a marker without a reason
            'async def all(session):\n    """Of any tenant."""\n'
            "    return await session.scalars(select(Adapter))\n",
            "ALL = select(Adapter)\n",
        ],
    )
    def test_a_tenants_model_without_a_tenant_is_a_breach(
        self, tmp_path: Path, function: str
    ) -> None:
        assert len(breaches(tmp_path, "repository.py", function)) == 1

    @pytest.mark.parametrize(
        "function",
        [
            "async def all(session, tenant_id):\n"
            "    query = select(Adapter).where(Adapter.tenant_id == tenant_id)\n"
            "    return await session.scalars(query)\n",
            "async def open(session, entry):\n"
            "    await session.execute(insert(Adapter).values(tenant_id=entry.tenant_id))\n",
            'async def due(session):\n    """Of any tenant: for the sweep."""\n'
            "    return await session.scalars(select(Adapter))\n",
            'async def of(session, ids):\n    """By its parent: found by their tenant."""\n'
            "    return await session.scalars(select(Check))\n",
            "async def base(session, digest):\n    return await session.get(BaseModel, digest)\n",
        ],
    )
    def test_a_tenant_or_a_reason_keeps_the_rule(self, tmp_path: Path, function: str) -> None:
        assert breaches(tmp_path, "run_repository.py", function) == []
