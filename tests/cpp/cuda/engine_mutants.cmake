# Faults planted in copies of the engine on CUDA, to prove that the tests would see them (as mutants.cmake).
#
# pycomm_engine_mutant(TESTS NAME FILE FROM TO FILTER): FILE of csrc, with the text FROM, which must occur exactly once,
# replaced by TO; linked with the tests (nccl or device) in place of the original; those of FILTER must fail under some
# seed.
function(pycomm_engine_mutant tests name file from to filter)
  pycomm_plant(${name} ${file} "${from}" "${to}" "" "")
  add_executable(mutant_${name} ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}/${file})
  target_compile_options(mutant_${name} PRIVATE -w -O1)
  target_link_options(mutant_${name} PRIVATE -s)
  target_link_libraries(mutant_${name} PRIVATE ${tests}_test_objects pycomm_cuda_engine)
  add_dependencies(mutant_${name} loopback_nccl)
  add_test(NAME mutant.${name} COMMAND sh ${mutant_runner} $<TARGET_FILE:mutant_${name}> ${filter})
  set_tests_properties(mutant.${name} PROPERTIES TIMEOUT ${timeout_s} LABELS cuda_${tests})
  add_dependencies(cuda_mutants mutant_${name})
endfunction()

pycomm_engine_mutant(nccl transfer_before_its_reduction engine/cuda/nccl_rounds.cc
  "if (slots_[slot].computes) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.comm(), computed(slot)));" ""
  "Nccl/EveryAlgorithm.Computes*/all_reduce_ring")
pycomm_engine_mutant(nccl reduction_before_its_transfer engine/cuda/nccl_rounds.cc
  "if (slots_[slot].travels) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.reduce(), travelled(slot)));" ""
  "Nccl/EveryAlgorithm.Computes*/all_reduce_ring")
pycomm_engine_mutant(nccl end_before_the_transfers engine/cuda/nccl_rounds.cc
  "return streams_.order(streams_.reduce(), streams_.comm(), kBetween);\n  }\n\n private:" "return Status();\n  }\n\n private:"
  "Nccl/EveryAlgorithm.Computes*/all_reduce_direct:NcclRounds.*:Nccl/EveryReduction.*/reduce_binomial")
if(NOT PYCOMM_SANITIZE STREQUAL "thread")  # wrong bits and no race, which would take minutes there
  pycomm_engine_mutant(nccl result_without_its_residual engine/cuda/nccl_rounds.cc
    "      s.residual = residual(step.part, tile);" "" "NcclCodes.AllReduce*")
endif()
pycomm_engine_mutant(nccl group_that_is_not_on_its_stream_yet transport/cuda/nccl_comm.cc
  "PYCOMM_RETURN_IF_ERROR(settle(api().group_end(), \"ncclGroupEnd\", patience));" "(void)api().group_end();"
  "NcclComm.AGroupReturns*")

pycomm_engine_mutant(device block_whose_stream_has_not_passed engine/cuda/device_arena.cc
  "if (!passed) {" "if (false) {" "DeviceArena.AStream*")
pycomm_engine_mutant(device block_of_a_call_that_is_under_way engine/cuda/device_arena.cc
  "if (auto end = context_->last_end()) block.after.push_back(std::move(end));" "" "DeviceArena.ACall*")
pycomm_engine_mutant(device block_of_a_captured_call engine/cuda/device_arena.cc
  "is_captured || !known.ok()" "!known.ok()" "DeviceArena.WhatGoes*")
pycomm_engine_mutant(device packing_of_a_graph engine/cuda/device_arena.cc
  "packing_is_captured_ |= is_captured;" "" "DevicePacking.AGraph*")
pycomm_engine_mutant(device packing_that_is_under_way engine/cuda/device_arena.cc
  "if (auto end = context_->last_end(); end != nullptr && !old.is_held) old.after.push_back(std::move(end));" ""
  "DevicePacking.Grows*")
