"""The configs that come with flowmill, by name."""

from __future__ import annotations

import re
from pathlib import Path

from flowmill.configs.errors import ConfigError
from flowmill.configs.suggestions import near_path, nearest

_FOLDER = Path(__file__).parent
#: Configs that a preset names: the one that it extends, and that of the run that it starts from.
_NAMED = re.compile(r"^(?:extends|  start_config): *(\S+)\.yaml *$", re.MULTILINE)
#: The smallest GPU for a preset of a published model, as estimated in docs/gpus.md; the others run on a CPU.
_GPU = re.compile(r"^# GPU: (.+)$", re.MULTILINE)
#: The command of a comment in a checkout, and elsewhere.
_COMMAND = ("flowmill run configs/", "flowmill run ")
_PROMPTS = re.compile(r"prompts/[\w.-]+")


def presets() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def preset_gpu(name: str) -> str:
    """Return the memory of the smallest GPU that a preset fits, or 'CPU'."""
    gpu = _GPU.search(preset_text(name))
    return "CPU" if gpu is None else gpu[1]


def preset_line(name: str) -> str:
    """Return the first sentence of a preset's head comment."""
    return re.split(r"(?<=[\w)])\. ", preset_comment(name))[0].rstrip(".")


def preset_text(name: str) -> str:
    """Return the YAML of a preset, with its comments, which name its command."""
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8").replace(*_COMMAND)


def preset_comment(name: str) -> str:
    """Return a preset's head comment, without commands, source and deviations."""
    comment: list[str] = []
    for line in preset_text(name).splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith(("#   ", "# GPU:", "# source:", "# deviates:")):
            comment.append(line.removeprefix("# "))
    return " ".join(comment)


def config_file(requested: str | Path, folder: Path = Path()) -> Path:
    """Return the named file if it exists below a folder, else the preset of that name, else the named file.

    Raises:
        ConfigError: ``requested`` is no name, such as the mapping of a config.
    """
    if not isinstance(requested, str | Path):
        raise ConfigError(
            f"config: a {type(requested).__name__} is neither the name of a preset, nor a file, nor a config. Give the "
            "sections of a mapping as arguments: flowmill.train(**sections)."
        )
    name, path = Path(requested), folder / requested
    if (path.is_dir() or not path.exists()) and name.name == str(requested) and name.stem in presets():
        return _FOLDER / f"{name.stem}.yaml"
    return path


def is_preset(path: Path) -> bool:
    """Return whether a file is a preset."""
    return path.parent == _FOLDER


def no_config(requested: str | Path, folder: Path = Path()) -> str:
    """Return the rest of the message that there is no such file or preset: the nearest one, and the list of presets."""
    if Path(requested).name == str(requested):
        names = {path.stem: path.name for path in folder.glob("*.y*ml")} | {name: name for name in presets()}
        near = next((names[stem] for stem in nearest(Path(requested).stem, names, most=1)), None)
    else:
        near = near_path(str(requested), (folder,))
    hint = f"Did you mean '{near}'? " if near else ""
    return f"does not exist. {hint}'flowmill presets' lists the configs that come with flowmill."


def preset_files(name: str) -> list[str]:
    """Return the files of a preset, relative to this folder: with configs, prompts and images that it names."""
    if name not in presets():
        near = nearest(name, presets())
        hint = f"Did you mean {' or '.join(repr(each) for each in near)}? " if near else ""
        raise ConfigError(f"There is no preset '{name}'. {hint}'flowmill presets' lists all.")
    text = preset_text(name)
    inherited = [path for other in _NAMED.findall(text) for path in preset_files(other)]
    named = [path for path in _PROMPTS.findall(text) if (_FOLDER / path).is_file()]
    images = [f"prompts/images/{image.name}" for image in sorted((_FOLDER / "prompts" / "images").iterdir())]
    lists = [(_FOLDER / path).read_bytes() for path in named]
    shown = [image for image in images if any(Path(image).name.encode() in each for each in lists)]
    return list(dict.fromkeys([f"{name}.yaml", *inherited, *named, *shown]))


def copy_preset(name: str, folder: Path) -> list[Path]:
    """Copy a preset and all its files into a folder, and return the copies."""
    contents = {folder / path: (_FOLDER / path).read_bytes() for path in preset_files(name)}
    # Comments name the preset by its path.
    before, after = (each.encode() for each in _COMMAND)
    contents = {path: data.replace(before, after) for path, data in contents.items()}
    for path, data in contents.items():
        if path.exists() and (not path.is_file() or path.read_bytes() != data):
            raise ConfigError(
                f"'{path}' exists and is another file. Move it away, or give another folder: --to FOLDER."
            )
    try:
        for path, data in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            # A killed process leaves no part of a file, which the next one would refuse as another file.
            unfinished = path.with_name(f".{path.name}.unfinished")
            unfinished.write_bytes(data)
            unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"--to '{folder}' cannot be written: {error.strerror}. Name another folder.") from None
    return list(contents)
