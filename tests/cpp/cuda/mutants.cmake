# Faults planted in copies of the kernels, to prove that the tests would see them.
#
# pycomm_mutant(NAME FILE FROM TO UNIT FILTER [FROM TO]) copies FILE of csrc/kernels/cuda with the text FROM, which must
# occur exactly once, replaced by TO, and so the second pair; compiles UNIT (a .cu, FILE itself or one that includes it) with the copy;
# links it with the tests in place of the original; and adds a test that passes when the tests of FILTER fail
# under some seed. The shipped sources know nothing of it; a FROM that is gone stops the configuration.
set(mutant_runner ${CMAKE_CURRENT_BINARY_DIR}/run_mutant.sh)
file(WRITE ${mutant_runner} [=[
# run_mutant.sh PROGRAM FILTER: exit 0 when the program fails under some seed.
[ -x "$1" ] || { echo "$1 was not built"; exit 1; }
export PEER_TEST_TIMEOUT_S=20
for seed in 0 1 2; do
  CUDA_ON_CPU_SEED=$seed "$1" --gtest_brief=1 --gtest_fail_fast --gtest_filter="$2" && continue
  echo "the fault was caught under seed $seed"
  exit 0
done
echo "no test of $2 failed: the fault was not seen"
exit 1
]=])

# pycomm_plant(NAME FILE FROM TO FROM TO): FILE of csrc with its texts replaced, as mutants/NAME/FILE; the second pair
# may be "" "". Not optional: an ARGV that is not given is the calling function's.
function(pycomm_plant name file from to from2 to2)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/${file})
  file(READ ${PROJECT_SOURCE_DIR}/csrc/${file} text)
  string(REPLACE ";" "<semicolon>" text "${text}")
  set(pairs "")
  foreach(part IN ITEMS "${from}" "${to}" "${from2}" "${to2}")
    string(REPLACE ";" "<semicolon>" part "${part}")
    list(APPEND pairs "${part}")
  endforeach()
  while(pairs)
    list(POP_FRONT pairs from to)
    if(from STREQUAL "")
      break()
    endif()
    string(FIND "${text}" "${from}" first)
    string(FIND "${text}" "${from}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
      message(FATAL_ERROR "mutant ${name}: its text must occur once in ${file}; bring its entry up to date")
    endif()
    string(REPLACE "${from}" "${to}" text "${text}")
  endwhile()
  string(REPLACE "<semicolon>" ";" text "${text}")
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}/${file} CONTENT "${text}" @ONLY)
endfunction()

function(pycomm_mutant name file from to unit filter)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name})
  pycomm_plant(${name} kernels/cuda/${file} "${from}" "${to}" "${ARGV6}" "${ARGV7}")
  if(NOT unit STREQUAL file)
    configure_file(${PROJECT_SOURCE_DIR}/csrc/kernels/cuda/${unit} ${folder}/kernels/cuda/${unit} COPYONLY)
  endif()
  set_source_files_properties(${folder}/kernels/cuda/${unit} PROPERTIES LANGUAGE CXX)
  add_executable(mutant_${name} ${folder}/kernels/cuda/${unit})
  target_include_directories(mutant_${name} BEFORE PRIVATE ${folder})
  target_compile_options(mutant_${name} PRIVATE -w -O1)
  target_link_options(mutant_${name} PRIVATE -s)  # else a sanitizer's debugging information makes each 100 MB
  target_link_libraries(mutant_${name} PRIVATE cuda_test_objects)
  add_test(NAME mutant.${name} COMMAND sh ${mutant_runner} $<TARGET_FILE:mutant_${name}> ${filter})
  set_tests_properties(mutant.${name} PROPERTIES TIMEOUT ${timeout_s} LABELS cuda)
  set_property(GLOBAL APPEND PROPERTY PYCOMM_MUTANTS mutant_${name})
endfunction()

# Under ThreadSanitizer the first run alone shows a missing barrier, as a race.
pycomm_mutant(barrier_before_reading norm.cu
  "  __syncthreads();\n  Partial all{0, 0};" "  Partial all{0, 0};" norm.cu "Cuda/Norm.Exact*")
if(NOT PYCOMM_SANITIZE STREQUAL "thread")
  # Needs more chunks than blocks, for which that sanitizer is too slow.
  pycomm_mutant(barrier_after_reading norm.cu
    "  __syncthreads();\n  return all;" "  return all;" norm.cu "Cuda/Norm.Is*")
pycomm_mutant(segment_of_a_chunk chunks.cuh
  "segments.end[middle] > chunk" "segments.end[middle] >= chunk" norm.cu "Cuda/Norm.Is*")
pycomm_mutant(whole_warp blocks.cu
  "int bits = kWarp / 2" "int bits = kWarp / 4" blocks.cu "Cuda/Blocks.Encode*")
pycomm_mutant(tail_overrun block_runs.cuh
  "n_left >= kRunElems && reinterpret_cast<uintptr_t>(to)" "n_left > 0 && reinterpret_cast<uintptr_t>(to)" blocks.cu
  "Cuda/Blocks.Encode*")
pycomm_mutant(feedback_of_a_block_that_is_not_finite blocks.cu
  "not_finite ? 0.0f : x - said.v[i]" "x - said.v[i]" blocks.cu "Cuda/Blocks.Encode*")
pycomm_mutant(own_source_of_a_pair blocks.cu
  "k + 1 == plain ? own" "k == plain ? own" blocks.cu "Cuda/Blocks.Reduce*")
pycomm_mutant(order_within_a_group blocks.cu
  "add(left, add(v[2], v[3]))" "add(add(left, v[2]), v[3])" blocks.cu "Cuda/Blocks.Reduce*")
pycomm_mutant(tail_missing cast.cu
  "i < chunk.n_elems - n_in_steps;" "i < head;" cast.cu "Cuda/Cast.Lengths*")
pycomm_mutant(alignment_of_one_side cast.cu
  "reinterpret_cast<uintptr_t>(src + i) % kPackBytes == 0" "true" cast.cu "Cuda/Cast.Lengths*")
endif()
if(PYCOMM_SANITIZE STREQUAL "")
  # The largest unit, so not under sanitizers as well.
  pycomm_mutant(a_source_is_left_out reduce.cu
    "launch_one<O, 5>, launch_one<O, 6>" "launch_one<O, 4>, launch_one<O, 6>" reduce.cu "Cuda/Reduce.Counts*")
  pycomm_mutant(order_of_the_tree ops.cuh
    "if (leaf < n - p)" "if (leaf >= 2 * p - n)" reduce.cu "Cuda/Reduce.Counts*float*sum")
endif()

# The order between ranks. ThreadSanitizer sees each as a race, some only it: x86 does not reorder what a relaxed flag
# leaves unordered, and a half of the staging that is written too early is seldom still being read. A fault may leave a
# rank waiting, until PEER_TEST_TIMEOUT_S.
set(peer_tests "Cuda/PeerCopy.CallsOneAfterAnother*")
pycomm_mutant(no_meeting_before_reading peer_copy.cu
  "if (!meet(call, shared, number, 0)) return;" "if (call.n_ranks < 0) return;" peer_copy.cu "${peer_tests}")
pycomm_mutant(no_barrier_before_the_flag peer.cuh
  "meet(const PeerCall& call, PeerShared& shared, uint64_t number, int phase) {\n  __syncthreads();"
  "meet(const PeerCall& call, PeerShared& shared, uint64_t number, int phase) {" peer_copy.cu "${peer_tests}")
pycomm_mutant(no_barrier_after_the_flag peer.cuh
  "  __syncthreads();\n  if (shared.blamed == 0) return true;\n  stop(" "  if (shared.blamed == 0) return true;\n  stop("
  peer_copy.cu "${peer_tests}")
pycomm_mutant(stale_number peer.cuh
  "own.calls[b] = number + 1" "own.calls[b] = number" peer_copy.cu "${peer_tests}")
# The number of the call comes from the host, which counts well, but not a graph's replays.
pycomm_mutant(number_from_the_host peer_copy.cu
  "  if (!enter(call, shared, &number)) return;" "  if (!enter(call, shared, &number)) return;\n  number = call.label;"
  peer_copy.cu "Cuda/PeerGraph.IsReplayedWithNewInputs/all_gather"
  "  return check_cuda(launch_resident(peer_copy_kernel, n_blocks, n_threads, stream, call), \"cuda peer_copy\");"
  "  static uint64_t counts[kMaxPeers];\n  PeerCall baked = call;\n  baked.label = counts[call.rank]++;
  return check_cuda(launch_resident(peer_copy_kernel, n_blocks, n_threads, stream, baked), \"cuda peer_copy\");")
pycomm_mutant(no_meeting_after_reading_tensors peer.cuh
  "if (two_shot || reads_tensors(call, shared)) {" "if (two_shot) {" peer_copy.cu "${peer_tests}")
if(PYCOMM_SANITIZE STREQUAL "thread")
  pycomm_mutant(relaxed_release peer.cuh
    "store_release_system(&theirs.flag," "store_relaxed_system(&theirs.flag," peer_copy.cu "${peer_tests}")
  pycomm_mutant(relaxed_acquire peer.cuh
    "load_acquire_system(&peer.flag)" "load_relaxed_system(&peer.flag)" peer_copy.cu "${peer_tests}")
  pycomm_mutant(one_half_of_the_staging peer.cuh
    "call.staging + (number & 1) * call.half_bytes" "call.staging" peer_copy.cu "${peer_tests}")
  pycomm_mutant(blocks_that_were_not_there_do_not_count peer.cuh
    "for (unsigned b = blockIdx.x; b < kMaxPeerBlocks; b += gridDim.x) own.calls[b]"
    "for (unsigned b = blockIdx.x; b < gridDim.x; b += gridDim.x) own.calls[b]" peer_copy.cu "${peer_tests}")
else()
  pycomm_mutant(tail_of_a_copy peer.cuh
    "i < n_bytes; ++i) write_byte" "i + 1 < n_bytes; ++i) write_byte" peer_copy.cu "Cuda/PeerCopy.AllGather*")
endif()
if(PYCOMM_SANITIZE STREQUAL "")  # the largest unit again
  pycomm_mutant(no_meeting_after_two_shot peer_reduce.cu
    "finish(call, shared, number);" "leave(call, number);" peer_reduce.cu "Cuda/PeerReduce.Lengths/float32_sum")
  pycomm_mutant(tail_of_a_reduction peer_reduce.cu
    "if (p == n_packs) {" "if (p == n_packs && n_packs == 0) {" peer_reduce.cu "Cuda/PeerReduce.Lengths/float32_sum")
endif()

get_property(mutants GLOBAL PROPERTY PYCOMM_MUTANTS)
add_custom_target(cuda_mutants DEPENDS ${mutants})
