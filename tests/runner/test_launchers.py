"""Launchers of two forms of arguments: C modules of one name, loaded again on several threads."""

import importlib.util
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from triton.runtime import build

from tpdet.kernels.cuda.compile.launchers import keep_launchers_apart

SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___launcher(void) { return PyModule_Create(&module); }
"""
FORMS = (1, 2)


def loaded(form):
    return build.compile_module_from_src(SOURCE % form, "__launcher")


def imported(path):
    """The module of a file by Python alone, as Triton loads it."""
    spec = importlib.util.spec_from_file_location("__launcher", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    keep_launchers_apart()


def test_a_module_keeps_its_functions():
    for _ in range(2):
        first, second = loaded(1), loaded(2)
        assert (first.launch(), second.launch()) == FORMS


def test_python_gives_a_module_that_is_loaded_again_the_functions_of_the_last_one():
    paths = [loaded(form).__file__ for form in FORMS]
    for path in paths:
        imported(path)
    first, _ = (imported(path) for path in paths)
    assert first.launch() == 2


def test_threads_get_their_own():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            launched = [*pool.map(lambda form: loaded(form).launch(), FORMS * 100)]
    finally:
        sys.setswitchinterval(before)
    assert launched == [*FORMS] * 100
