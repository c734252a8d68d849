// The decoders of families of opcodes. Each is defined in the file that executes its family.
#pragma once

#include "ptx.hpp"

namespace ptxemu {

// A decoder sets Instruction::lanes or Instruction::handler and the members that these read. It returns false
// if the emulator does not model the instruction with its modifiers.
bool decode_arithmetic(Instruction& in);  // alu.cpp
bool decode_logic(Instruction& in);       // logic.cpp
bool decode_cvt(Instruction& in);         // convert.cpp
bool decode_memory(Instruction& in);      // exec_memory.cpp
bool decode_matrix(Instruction& in);      // exec_matrix.cpp
bool decode_mma_sync(Instruction& in);    // exec_mma_sync.cpp
bool decode_control(Instruction& in);     // exec_control.cpp
bool decode_warp(Instruction& in);        // exec_warp.cpp
bool decode_barrier(Instruction& in);     // exec_barrier.cpp
bool decode_mbarrier(Instruction& in);    // exec_mbarrier.cpp
bool decode_bulk(Instruction& in);        // exec_tma.cpp
bool decode_bulk_copy(Instruction& in);   // exec_copies.cpp
bool decode_async_copy(Instruction& in);  // exec_copies.cpp
bool decode_tensormap(Instruction& in);   // exec_tensormap.cpp
bool decode_clc(Instruction& in);         // exec_clc.cpp
bool decode_tcgen05(Instruction& in);     // exec_tcgen05.cpp

}  // namespace ptxemu
