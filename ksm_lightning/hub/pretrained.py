"""``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` of a feature extractor. Needs the extra ``hub``."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Self

from ksm_lightning.extras import import_extra
from ksm_lightning.files import draft_path, draft_tag, naming_errors
from ksm_lightning.hub.card import METADATA, card_text

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_WANTED = "give a folder written by `save_pretrained`, or the name of such a repository on the Hugging Face Hub"


class Pretrained:
    """Methods of a feature extractor that reads and writes folders and repositories of the Hugging Face Hub.

    A folder holds ``model.safetensors``, the file of :meth:`FeatureExtractor.save
    <ksm_lightning.extractor.FeatureExtractor.save>`; ``config.json``, its description; and ``README.md``, a model card.
    """

    _provenance: dict[str, Any] | None = None
    _source: tuple[dict[str, Any], Path] | None = None  # parts of the checkpoint, and its path

    def remember(self, content: dict[str, Any], path: str | Path) -> None:
        """Keep what :attr:`provenance` needs of the content of a checkpoint."""
        about = {"training": content["ksm_lightning"]["training"]}
        kept = {key: content[key] for key in ("hyper_parameters", "global_step")}
        self._source = ({**kept, "ksm_lightning": about}, Path(path).absolute())

    @property
    def provenance(self) -> dict[str, Any] | None:
        """How the extractor was trained, see :func:`~ksm_lightning.hub.provenance.provenance_of`; None if not known.

        The logged errors are read from the run folder at the first access.
        """
        if self._provenance is None and self._source is not None:
            from ksm_lightning.hub.provenance import provenance_of  # imports Lightning

            self._provenance = provenance_of(*self._source)
        return self._provenance

    @provenance.setter
    def provenance(self, provenance: dict[str, Any] | None) -> None:
        self._provenance = provenance

    def save_pretrained(self, folder: str | Path, *, name: str | None = None) -> Path:
        """Write the extractor and its model card to a new folder, which appears when it is complete.

        Args:
            folder: The folder, which must not exist, or be empty.
            name: Name of the repository in the model card. Default: the name of the folder.

        Raises:
            FileExistsError: If the folder is not empty.
            MissingExtraError: If the extra ``hub`` is not installed.
        """
        folder = Path(folder)
        model = _hub_model(type(self))(self)
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists already: choose another folder.")
        with naming_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            draft = draft_path(folder, draft_tag())
            try:
                model.save_pretrained(draft, model_card_kwargs={"name": name or folder.name})
                os.replace(draft, folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return folder

    def push_to_hub(
        self,
        name: str,
        *,
        commit_message: str = "Add a feature extractor of ksm_lightning",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
    ) -> str:
        """Upload the extractor and its model card to a repository of the Hugging Face Hub, which is created if needed.

        Args:
            name: Name of the repository, such as ``user/half-moons``.
            commit_message: Message of the commit.
            private: Whether a new repository is private. Default: public, or as the organisation has chosen.
            token: Token to log in with. Default: that of ``hf auth login``.
            branch: Branch to write to. Default: ``main``.
            create_pr: Whether to open a pull request instead.

        Returns:
            The address of the commit.

        Raises:
            ConnectionError: If the upload failed, with the reason.
            MissingExtraError: If the extra ``hub`` is not installed.
        """
        model = _hub_model(type(self))(self)
        try:
            address = model.push_to_hub(
                name, commit_message=commit_message, private=private, token=token, branch=branch, create_pr=create_pr,
                model_card_kwargs={"name": name},
            )  # fmt: skip
        except Exception as error:  # of the network, the server and several libraries
            raise ConnectionError(
                f"The extractor could not be uploaded to {name} ({_reason(error)}): log in with `hf auth login`, and "
                "check the name and the network."
            ) from error
        return str(address)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> Self:
        """Load an extractor, on the CPU, from a folder or from the Hugging Face Hub. Nothing in it is run.

        Args:
            name: A folder that :meth:`save_pretrained` wrote, or the name of a repository on the Hub.
            revision: Branch, tag or commit of the repository. Default: ``main``.
            token: Token to log in with. Default: that of ``hf auth login``.
            cache_dir: Folder for downloaded files. Default: the library's cache.
            force_download: Whether to download files that are in the cache.
            local_files_only: Whether to use the cache only.

        Raises:
            FileNotFoundError: If the folder or the repository has no extractor, or cannot be reached.
            ValueError: If the files are damaged or belong to another model.
            MissingExtraError: If the extra ``hub`` is not installed.
        """
        hub_model = _hub_model(cls)
        try:
            made: Self = hub_model.from_pretrained(
                str(name), revision=revision, token=token, cache_dir=cache_dir, force_download=force_download,
                local_files_only=local_files_only,
            ).extractor  # fmt: skip
        except _BadFolderError as error:
            raise ValueError(str(error)) from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is damaged: its {CONFIG} is not JSON ({error}).") from error
        except Exception as error:  # of the network, the server and several libraries
            raise FileNotFoundError(f"{name} could not be loaded ({_reason(error)}): {_WANTED}.") from error
        return made


class _BadFolderError(Exception):
    """A sentence about files that are damaged or foreign."""


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".:") or type(error).__name__


def _hub_model(extractor_class: type[Any]) -> Any:
    """A class of ``huggingface_hub``'s mixin around an extractor. The library is imported now."""
    library = import_extra("huggingface_hub", "hub", "save_pretrained, from_pretrained and push_to_hub")

    class HubModel(library.ModelHubMixin):  # type: ignore[misc, name-defined]  # no types without the extra
        def __init__(self, extractor: Any) -> None:
            self.extractor = extractor

        def _save_pretrained(self, save_directory: Path) -> None:
            self.extractor.save(save_directory / WEIGHTS)
            about = {**self.extractor.description, "training": self.extractor.provenance}
            (save_directory / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

        def generate_model_card(self, *args: Any, name: str = "", **kwargs: Any) -> Any:
            made = self.extractor
            metadata = library.ModelCardData(**METADATA).to_yaml()
            return library.ModelCard(
                f"---\n{metadata}\n---\n\n{card_text(made.description, len(made.W), made.provenance, name)}"
            )

        @classmethod
        def _from_pretrained(cls, *, model_id: str, config: Any = None, **options: Any) -> Any:
            folder = Path(model_id)
            names = ("revision", "cache_dir", "force_download", "token", "local_files_only")
            path = folder / WEIGHTS
            if not folder.is_dir():
                chosen = {key: options[key] for key in names}
                path = Path(library.hf_hub_download(repo_id=model_id, filename=WEIGHTS, **chosen))
            elif not path.is_file():
                raise FileNotFoundError(f"it has no {WEIGHTS}")
            try:
                extractor = extractor_class.load(path)
            except ValueError as error:
                raise _BadFolderError(str(error)) from error
            extractor.provenance = _training_in(config, extractor.description, model_id)
            return cls(extractor)

    return HubModel


def _training_in(config: Any, description: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The training that a ``config.json`` describes, after checking that it belongs to the weights beside it."""
    if config is None:
        return None
    if config.get("identity") != description["identity"]:
        raise _BadFolderError(f"{name} is damaged: its {CONFIG} does not belong to its {WEIGHTS}.")
    training = config.get("training")
    if training is not None and not isinstance(training, dict):
        raise _BadFolderError(f"{name} is damaged: `training` in its {CONFIG} must hold named values.")
    return training
