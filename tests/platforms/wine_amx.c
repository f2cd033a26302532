/* Preloaded into Wine's processes by tests/platforms/wine.sh: asks Linux for the tile registers of AMX.

Windows gives them to every process, so onnxruntime.dll uses them without asking; Linux gives them to a process that
asked by arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), and stops others with an illegal instruction. Processors without
AMX refuse, and nothing else happens. No library is needed. */

enum { SYS_ARCH_PRCTL = 158, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };

__attribute__((constructor)) static void ask(void) {
    long result, call = SYS_ARCH_PRCTL, request = ARCH_REQ_XCOMP_PERM, feature = XTILEDATA;
    __asm__ volatile("syscall" : "=a"(result) : "a"(call), "D"(request), "S"(feature) : "rcx", "r11", "memory");
}
