# pycomm_cuda_engine: what moves data between GPUs (csrc/transport/cuda, csrc/engine/cuda), where CUDA is built.
# NCCL is opened at run time, so nothing of it is needed to build. The engine's communicators use it, and it uses the
# engine's groups: two static libraries that link each other. Without CUDA, engine/no_device.cc takes its place.
file(GLOB cuda_engine_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/transport/cuda/*.cc
  ${CMAKE_CURRENT_LIST_DIR}/*.cc)
if(PYCOMM_HAS_CUDA)
  add_library(pycomm_cuda_engine STATIC ${cuda_engine_sources})
  target_link_libraries(pycomm_cuda_engine PUBLIC pycomm_engine pycomm_cuda ${CMAKE_DL_LIBS})
  target_link_libraries(pycomm_engine PUBLIC pycomm_cuda_engine)
  if(TARGET cuda_on_cpu)
    target_link_libraries(pycomm_cuda_engine PRIVATE cuda_on_cpu)
    # A file with a planted fault (tests/cpp/cuda/engine_mutants.cmake) takes the place of its own object.
    set_target_properties(pycomm_cuda_engine PROPERTIES UNITY_BUILD OFF)
  else()
    target_include_directories(pycomm_cuda_engine SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  endif()
else()
  add_library(pycomm_cuda_engine INTERFACE)
endif()
