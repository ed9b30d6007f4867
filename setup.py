"""The package layout. Everything else about the project stands in pyproject.toml.

The top-level folders `models/` and `triton_kernels/` install *inside* `ppsd_rt`, so that nothing called `models` lands
in anybody's site-packages.
"""

from setuptools import find_packages, setup

FOLDERS = {"ppsd_rt": "ppsd_rt", "ppsd_rt.models": "models", "ppsd_rt.triton_kernels": "triton_kernels"}

packages = []
for package, folder in FOLDERS.items():
    packages += [package, *(f"{package}.{found}" for found in find_packages(folder))]

setup(
    packages=packages,
    package_dir=FOLDERS,
    package_data={"ppsd_rt": ["py.typed"], "ppsd_rt.models": ["heads/*.safetensors"]},
)
