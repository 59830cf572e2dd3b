"""Give Hydra the configs without a yaml: the defaults of parts and of commands (`stability.cli.conf`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from stability.cli.conf import OF_SPEC, conf_dir, declared_choices, is_group, spec_values, values_of
from stability.config.base import AXES
from stability.config.parse import SPECS


class DeclaredSource(ConfigSource):
    """Configs made of classes' defaults: ``GROUP/NAME``, ``settings/COMMAND`` and ``COMMAND``."""

    @staticmethod
    def scheme() -> str:
        return "declared"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config at a path that `is_config` accepts."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        values = spec_values(name) if group in ("", OF_SPEC) else values_of(group, name)
        package = f"{group}.{name}" if group in AXES else "_global_" if group in ("", OF_SPEC) else group
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(values), {"package": package})

    def is_group(self, config_path: str) -> bool:
        return is_group(config_path.rstrip("/"))

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return name in (SPECS if group in ("", OF_SPEC) else declared_choices(group))

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return sorted(declared_choices(config_path)) if results_filter is not ObjectType.GROUP else []


class _AfterYamls(SearchPathPlugin):
    """Place `DeclaredSource` behind conf/, whose yamls then have precedence."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("stability", f"{DeclaredSource.scheme()}://")


@contextmanager
def open_compose() -> Iterator[Callable[..., Any]]:
    """Yield Hydra's ``compose`` for conf/ and the declared defaults."""
    for plugin in (DeclaredSource, _AfterYamls):
        Plugins.instance().register(plugin)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield compose
