"""What pyproject.toml cannot say: a wheel has the recipes, as trainkit/recipes."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies recipes/*.py beside the modules; editable installations read them where they are."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.mkpath(str(Path(self.build_lib, "trainkit", "recipes")))
            for path, built in self._pair_recipes():
                self.copy_file(path, built)

    def get_source_files(self):
        return [*super().get_source_files(), *(path for path, _ in self._pair_recipes())]

    def get_outputs(self, include_bytecode=True):
        built = [] if self.editable_mode else [built for _, built in self._pair_recipes()]
        return [*super().get_outputs(include_bytecode), *built]

    def _pair_recipes(self):
        paths = sorted(Path("recipes").glob("*.py"))
        folder = Path(self.build_lib, "trainkit", "recipes")
        return [(str(path), str(folder / path.name)) for path in paths]


setup(cmdclass={"build_py": BuildWithRecipes})
