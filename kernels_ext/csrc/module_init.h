// Makes a shared library importable by Python. The module is empty: importing it runs the static objects
// that register the library's ops with torch, and the ops are then called through torch.ops.kernels_ext.
#pragma once

#include <Python.h>

#define KERNELS_EMPTY_PYTHON_MODULE(NAME)                                                                   \
  extern "C" __attribute__((visibility("default"))) PyObject* PyInit_##NAME(void);                          \
  extern "C" PyObject* PyInit_##NAME(void) {                                                                \
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #NAME, nullptr, -1, nullptr, nullptr, nullptr,  \
                                     nullptr, nullptr};                                                     \
    return PyModule_Create(&definition);                                                                    \
  }
