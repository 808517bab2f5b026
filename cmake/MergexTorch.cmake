# torch::cpu: LibTorch as an imported target. Its own package files are not used: they ask for nvcc and add
# directory-wide flags.
if(NOT MERGEX_TORCH_DIR)
  file(GLOB fetched ${CMAKE_SOURCE_DIR}/.deps/venv/lib/python3*/site-packages/torch)
  if(NOT fetched)
    message(FATAL_ERROR "LibTorch not found: run ./bootstrap.sh deps, or set -DMERGEX_TORCH_DIR=/path/to/torch")
  endif()
  list(GET fetched 0 MERGEX_TORCH_DIR)
endif()
foreach(needed include/ATen/ATen.h include/torch/csrc/api/include/torch/torch.h lib/libtorch_cpu.so lib/libc10.so)
  if(NOT EXISTS ${MERGEX_TORCH_DIR}/${needed})
    message(FATAL_ERROR "MERGEX_TORCH_DIR=${MERGEX_TORCH_DIR} holds no ${needed}: it must be the folder with LibTorch's include/ and lib/")
  endif()
endforeach()
message(STATUS "LibTorch: ${MERGEX_TORCH_DIR}")

add_library(torch_cpu INTERFACE)
add_library(torch::cpu ALIAS torch_cpu)
# -idirafter: LibTorch carries a newer fmt, which must not be found before the system's.
target_compile_options(torch_cpu INTERFACE
  "SHELL:-idirafter ${MERGEX_TORCH_DIR}/include"
  "SHELL:-idirafter ${MERGEX_TORCH_DIR}/include/torch/csrc/api/include")
target_link_libraries(torch_cpu INTERFACE ${MERGEX_TORCH_DIR}/lib/libtorch_cpu.so ${MERGEX_TORCH_DIR}/lib/libc10.so)
# The OpenMP library that LibTorch runs on: a second one would be a second pool of threads.
file(GLOB torch_openmp ${MERGEX_TORCH_DIR}/lib/libgomp*.so* ${MERGEX_TORCH_DIR}/lib/libiomp5.so)
list(APPEND torch_openmp gomp)
list(GET torch_openmp 0 torch_openmp)
target_link_libraries(torch_cpu INTERFACE ${torch_openmp})
# The wheel's libraries find NVIDIA's by RPATH; the linker has to be told where they lie.
file(GLOB nvidia_library_dirs ${MERGEX_TORCH_DIR}/../nvidia/*/lib)
foreach(dir IN LISTS nvidia_library_dirs)
  target_link_options(torch_cpu INTERFACE -Wl,-rpath-link,${dir})
endforeach()
