"""Numbers as people read them."""

from datetime import UTC, datetime


def size(nbytes: int) -> str:
    """4,915,200 -> `4.7 MiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024 or unit == "GiB":
            break
    return f"{value:.1f} {unit}"


def moment(unix_s: int) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)


def figure(value: object) -> str:
    """A figure of a validation check; long lists are shortened."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        shown = ", ".join(figure(item) for item in value[:8])
        return shown + (f" … ({len(value)} in all)" if len(value) > 8 else "")
    if isinstance(value, dict):
        pairs = list(value.items())
        shown = ", ".join(f"{name}: {figure(item)}" for name, item in pairs[:8])
        return shown + (f" … ({len(pairs)} in all)" if len(pairs) > 8 else "")
    return str(value)
