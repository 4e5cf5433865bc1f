# Faults planted in copies of what runs over NCCL, to prove that the tests would see them (as mutants.cmake).
#
# pycomm_nccl_mutant(NAME FILE FROM TO FILTER): FILE of csrc, with the text FROM, which must occur exactly once,
# replaced by TO; linked with the tests in place of the original; the tests of FILTER must fail under some seed.
function(pycomm_nccl_mutant name file from to filter)
  set(copy ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}/${file})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/${file})
  file(READ ${PROJECT_SOURCE_DIR}/csrc/${file} text)
  string(REPLACE ";" "<semicolon>" text "${text}")
  string(REPLACE ";" "<semicolon>" from "${from}")
  string(REPLACE ";" "<semicolon>" to "${to}")
  string(FIND "${text}" "${from}" first)
  string(FIND "${text}" "${from}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "mutant ${name}: its text must occur once in ${file}; bring nccl_mutants.cmake up to date")
  endif()
  string(REPLACE "${from}" "${to}" text "${text}")
  string(REPLACE "<semicolon>" ";" text "${text}")
  file(CONFIGURE OUTPUT ${copy} CONTENT "${text}" @ONLY)
  add_executable(mutant_${name} ${copy})
  target_compile_options(mutant_${name} PRIVATE -w -O1)
  target_link_options(mutant_${name} PRIVATE -s)
  target_link_libraries(mutant_${name} PRIVATE nccl_test_objects pycomm_cuda_engine)
  add_dependencies(mutant_${name} loopback_nccl)
  add_test(NAME mutant.${name} COMMAND sh ${mutant_runner} $<TARGET_FILE:mutant_${name}> ${filter})
  set_tests_properties(mutant.${name} PROPERTIES TIMEOUT 120 LABELS cuda_nccl)
  add_dependencies(cuda_mutants mutant_${name})
endfunction()

pycomm_nccl_mutant(transfer_before_its_reduction engine/cuda/nccl_rounds.cc
  "if (slots_[slot].computes) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.comm(), computed(slot)));" ""
  "Nccl/EveryAlgorithm.Computes*/all_reduce_ring")
pycomm_nccl_mutant(reduction_before_its_transfer engine/cuda/nccl_rounds.cc
  "if (slots_[slot].travels) PYCOMM_RETURN_IF_ERROR(streams_.wait(streams_.reduce(), travelled(slot)));" ""
  "Nccl/EveryAlgorithm.Computes*/all_reduce_ring")
pycomm_nccl_mutant(end_before_the_transfers engine/cuda/nccl_rounds.cc
  "return streams_.order(streams_.reduce(), streams_.comm(), kBetween);\n  }\n\n private:" "return Status();\n  }\n\n private:"
  "Nccl/EveryAlgorithm.Computes*/all_reduce_direct:NcclRounds.*:Nccl/EveryReduction.*/reduce_binomial")
pycomm_nccl_mutant(result_without_its_residual engine/cuda/nccl_rounds.cc
  "      s.residual = residual(step.part, tile);" "" "NcclCodes.AllReduce*")
pycomm_nccl_mutant(group_that_is_not_on_its_stream_yet transport/cuda/nccl_comm.cc
  "return settle(api().group_end(), \"ncclGroupEnd\", patience);" "(void)api().group_end(); return Status();"
  "NcclComm.AGroupReturns*")
