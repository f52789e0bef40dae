"""Draw the pictures of mesh.md. A test fails when they are outdated."""

from pathlib import Path

from phalanx.mesh._drawing import MeshView
from phalanx.mesh._plan import plan_mesh
from phalanx.mesh.layout import MeshLayout

MESH = MeshLayout.from_sizes_strides((2, 2, 4))
RANK = 6


def pictures() -> dict[str, str]:
    """Return every picture by the name of its file."""
    return {
        "mesh.svg": _part(MESH, "pp", "dp", "tp"),
        "slice-dp-tp.svg": _part(MESH[1:], "dp", "tp"),
        "flatten-pp-tp.svg": _part(MeshLayout([MESH[0], MESH[2]]).flatten(), "pp_tp"),
        "unflatten-tp.svg": _part(
            MESH.splice(2, 3, MESH[2].composition(MeshLayout.from_sizes_strides((2, 2)))),
            "pp",
            "dp",
            "cp",
            "ep",
        ),
        "large.svg": plan_mesh("8x16x8", names="dp,pp,tp", rank=513, hosts=128).draw(svg=True),
    }


def _part(layout: MeshLayout, *names: str) -> str:
    start, _ = layout.locate(RANK)
    view = MeshView(layout, names=names, rank=RANK, ranks_per_host=8, start=start, svg=True)
    return view.draw()


if __name__ == "__main__":
    for name, picture in pictures().items():
        (Path(__file__).parent / name).write_text(picture, encoding="utf-8")
