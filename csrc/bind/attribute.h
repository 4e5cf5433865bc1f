// An attribute of torch.Tensor that is read for every tensor of every call: its getter is found once on the
// class, because Python's lookup by name costs as much as the getter does.
#pragma once

#include <Python.h>

namespace pycomm {

class Attribute {
 public:
  // Finds it on `type`; false with a Python error. Where the class has no plain getter for it, `get` looks it
  // up by name.
  bool find(PyObject* type, const char* name) {
    name_ = PyUnicode_InternFromString(name);
    PyObject* found = name_ != nullptr ? PyObject_GetAttr(type, name_) : nullptr;
    if (found == nullptr) return false;
    getset_ = nullptr;
    if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
      getset_ = reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset;  // lives as long as the class
    }
    Py_DECREF(found);
    return true;
  }
  // A new reference; null with a Python error. `tensor` is an instance of the class.
  PyObject* get(PyObject* tensor) const {
    return getset_ != nullptr ? getset_->get(tensor, getset_->closure) : PyObject_GetAttr(tensor, name_);
  }

 private:
  PyObject* name_ = nullptr;
  PyGetSetDef* getset_ = nullptr;
};

}  // namespace pycomm
