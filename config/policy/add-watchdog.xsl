<?xml version="1.0"?>
<!-- A watchdog: once a guest has begun to feed it and stops, the guest is reset. -->
<xsl:stylesheet version="1.0" xmlns:xsl="http://www.w3.org/1999/XSL/Transform">
  <xsl:template match="@* | node()">
    <xsl:copy><xsl:apply-templates select="@* | node()"/></xsl:copy>
  </xsl:template>

  <xsl:template match="/domain/devices[not(watchdog)]">
    <xsl:copy>
      <xsl:apply-templates select="@* | node()"/>
      <watchdog model="i6300esb" action="reset"/>
    </xsl:copy>
  </xsl:template>
</xsl:stylesheet>
