# PYCOMM_CUDA: whether and how the CUDA kernels are built. Gives the library pycomm_cuda in every case.
#
#   off        left out: pycomm_cuda has no code
#   on         nvcc must be there: sm_80, sm_90, sm_100 (what this nvcc knows of them) and PTX of the newest;
#              the CUDA runtime is linked statically, so that the module needs no library of NVIDIA's to import
#   auto       on where nvcc is found, else off, with a line that says so
#   emulated   the same sources compiled as C++ for the CPU, against tests/cuda_on_cpu (docs/cuda.md)
#
# The environment variable of the same name gives the default, so that `PYCOMM_CUDA=off pip install .` works.
if(DEFINED ENV{PYCOMM_CUDA})
  set(default_cuda "$ENV{PYCOMM_CUDA}")
else()
  set(default_cuda auto)
endif()
set(PYCOMM_CUDA ${default_cuda} CACHE STRING "CUDA kernels: auto, on, off or emulated")
if(NOT PYCOMM_CUDA MATCHES "^(auto|on|off|emulated)$")
  message(FATAL_ERROR "PYCOMM_CUDA is '${PYCOMM_CUDA}'; expected auto, on, off or emulated")
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu ${CMAKE_CURRENT_LIST_DIR}/*.cc)
set(PYCOMM_HAS_CUDA OFF)
if(PYCOMM_CUDA STREQUAL "emulated")
  add_subdirectory(tests/cuda_on_cpu)
  set_source_files_properties(${cuda_sources} PROPERTIES LANGUAGE CXX)
  add_library(pycomm_cuda STATIC ${cuda_sources})
  target_link_libraries(pycomm_cuda PRIVATE cuda_on_cpu)
  target_compile_definitions(pycomm_cuda PUBLIC PYCOMM_CUDA_EMULATED)
  if(PYCOMM_SANITIZE STREQUAL "thread")  # to which each CUDA thread is a fiber of 0.1 ms
    target_compile_definitions(pycomm_cuda PUBLIC PYCOMM_FEW_THREADS)
  endif()
  set_target_properties(pycomm_cuda PROPERTIES UNITY_BUILD OFF)  # as of pycomm_cuda_engine
  target_compile_options(pycomm_cuda PRIVATE -O1)  # half the time to compile, and the tests spend theirs elsewhere
  set(PYCOMM_HAS_CUDA ON)
  message(NOTICE "CUDA is emulated on the CPU: for tests only")
elseif(NOT PYCOMM_CUDA STREQUAL "off")
  find_program(PYCOMM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda/bin)
  if(PYCOMM_NVCC)
    set(CMAKE_CUDA_COMPILER ${PYCOMM_NVCC})
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # ours, below; the check of the compiler needs none
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 and older
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    endif()
    set(architectures 80-real 90-real)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      list(APPEND architectures 100-real 100-virtual)
    else()
      list(APPEND architectures 90-virtual)
    endif()
    set(PYCOMM_CUDA_ARCHITECTURES "${architectures}" CACHE STRING "CMAKE_CUDA_ARCHITECTURES of pycomm_cuda")
    # As CMAKE_UNITY_BUILD does for C++: half of these files' time is headers, for each architecture and the host. Their
    # own names must differ, which only nvcc sees.
    set(small ${cuda_sources})
    list(FILTER small INCLUDE REGEX "/(blocks|cast|norm)\\.cu$")
    list(REMOVE_ITEM cuda_sources ${small})
    list(TRANSFORM small REPLACE "(.+)" "#include \"\\1\"\n")
    list(JOIN small "" small)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/small_kernels.cu CONTENT "@small@" @ONLY)
    add_library(pycomm_cuda STATIC ${cuda_sources} ${PROJECT_BINARY_DIR}/small_kernels.cu)
    set_target_properties(pycomm_cuda PROPERTIES UNITY_BUILD OFF
      CUDA_ARCHITECTURES "${PYCOMM_CUDA_ARCHITECTURES}" CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
      CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
    set(nvcc_options --fmad=false -O3 --threads=3)  # an architecture each, or the last would keep one core
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
      list(APPEND nvcc_options --compress-mode=size)  # all its drivers can unpack it
      # A third less time to compile for the same loops; those of peers would spill registers.
      set(quick ${cuda_sources} ${PROJECT_BINARY_DIR}/small_kernels.cu)
      list(FILTER quick INCLUDE REGEX "/(reduce|small_kernels)\\.cu$")
      set_source_files_properties(${quick} PROPERTIES COMPILE_OPTIONS "--Ofast-compile;min")
    endif()
    target_compile_options(pycomm_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${nvcc_options}>")
    target_include_directories(pycomm_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    set(PYCOMM_HAS_CUDA ON)
    message(NOTICE "CUDA ${CMAKE_CUDA_COMPILER_VERSION}: ${PYCOMM_CUDA_ARCHITECTURES} (${PYCOMM_NVCC})")
  elseif(PYCOMM_CUDA STREQUAL "on")
    message(FATAL_ERROR "PYCOMM_CUDA is on, and nvcc was not found: install the CUDA toolkit, set CUDA_HOME, "
                        "or use PYCOMM_CUDA=off")
  else()
    message(NOTICE "CUDA was left out: nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)")
  endif()
else()
  message(NOTICE "CUDA was left out: PYCOMM_CUDA=off")
endif()

if(PYCOMM_HAS_CUDA)
  target_include_directories(pycomm_cuda PUBLIC csrc)
  target_link_libraries(pycomm_cuda PUBLIC pycomm_base)
  target_compile_definitions(pycomm_cuda PUBLIC PYCOMM_HAS_CUDA)
else()
  add_library(pycomm_cuda INTERFACE)
endif()
